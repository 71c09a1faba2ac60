"""Attention while a model trains: figures of each head, alarms, curves."""

from cumulant.lens.monitoring.alarms import Alarm, AttentionAlarm, Thresholds
from cumulant.lens.monitoring.log import MonitorLog, Watched
from cumulant.lens.monitoring.monitor import Monitor

__all__ = ["Alarm", "AttentionAlarm", "Monitor", "MonitorLog", "Thresholds", "Watched"]
