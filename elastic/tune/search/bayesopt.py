"""Not supported: importing it raises; see `refused`."""

from elastic.tune.search.refused import refuse

refuse(__name__)
