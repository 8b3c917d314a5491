"""Not here on purpose; see `refused`."""

from elastic.train.refused import refuse

refuse(__name__)
