"""Not supported: importing it raises; see `refused`."""

from elastic.train.refused import refuse

refuse(__name__)
