"""The lens: what attention does in a real model, as numbers of an exponential family."""

from cumulant.core.progress import Progress
from cumulant.integrations.transformers import register
from cumulant.lens.ablating import ablate
from cumulant.lens.columns import COLUMNS, TABLES
from cumulant.lens.examination import Examination, compare
from cumulant.lens.examining import examine
from cumulant.lens.laws import laws
from cumulant.lens.models import load
from cumulant.lens.monitoring import Alarm, AttentionAlarm, Monitor, MonitorLog, Thresholds
from cumulant.lens.observing import observe
from cumulant.lens.tables import Lens
from cumulant.lens.texts import Text

__all__ = [
    "COLUMNS",
    "TABLES",
    "Alarm",
    "AttentionAlarm",
    "Examination",
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
