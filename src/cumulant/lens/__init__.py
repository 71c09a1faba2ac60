"""The lens: what attention does in a real model, as numbers of an exponential family."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cumulant.core.progress import Progress
    from cumulant.integrations.transformers import register
    from cumulant.lens.ablating import ablate
    from cumulant.lens.columns import COLUMNS, TABLES
    from cumulant.lens.examination import Examination, compare
    from cumulant.lens.examining import examine
    from cumulant.lens.head_picture import HeadAttention
    from cumulant.lens.models import load
    from cumulant.lens.monitoring import Alarm, AttentionAlarm, Monitor, MonitorLog, Thresholds
    from cumulant.lens.observing import observe
    from cumulant.lens.standing_in import laws
    from cumulant.lens.tables import Lens
    from cumulant.lens.texts import Text

__all__ = [
    "COLUMNS",
    "TABLES",
    "Alarm",
    "AttentionAlarm",
    "Examination",
    "HeadAttention",
    "Lens",
    "Monitor",
    "MonitorLog",
    "Progress",
    "Text",
    "Thresholds",
    "ablate",
    "compare",
    "examine",
    "laws",
    "load",
    "observe",
    "register",
]

# Imported when it is first asked for: `cumulant lens --help` reads `extras` and waits for no torch.
_HOMES = {
    "core.progress": "Progress",
    "integrations.transformers": "register",
    "lens.ablating": "ablate",
    "lens.columns": "COLUMNS TABLES",
    "lens.examination": "Examination compare",
    "lens.examining": "examine",
    "lens.head_picture": "HeadAttention",
    "lens.standing_in": "laws",
    "lens.models": "load",
    "lens.monitoring": "Alarm AttentionAlarm Monitor MonitorLog Thresholds",
    "lens.observing": "observe",
    "lens.tables": "Lens",
    "lens.texts": "Text",
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"cumulant.{_NAMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
