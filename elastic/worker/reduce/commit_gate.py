"""When a step is final: the device has finished it, and the group was found whole after that.

On a device everything is late: the host has posted the exchange of gradients, waited for it, and
could enqueue the optimizer, long before the first byte has come. If a member dies then, the group
is aborted, which ends the exchange without an error and with partial sums. So a step goes through
this gate between its exchange and its optimizer, and in this order:

1. Our device has done our own part: forward, backward, what the script made of the gradients. Who
   hangs here stands still, and all others wait for it (see 2): it is found as any hung rank is.
2. Our device has done the exchange. This is waiting for the others, and is told as such; it is
   given up as soon as the group is over, because it may never end then.
3. We look whether our group is whole: not aborted, no connection lost, no communicator with an
   error. An abort is announced before it begins: had one ended the exchange, it shows here.
4. Everyone tells everyone that it has come so far; a message of the host's. Whoever has heard all
   knows that no device is in the exchange any more, and that none was made to leave it: so an
   abort that begins now, anywhere, finds nothing to break. (That we are whole does not say it of
   the others: an aborted sender may have given us what it had.)

`p.grad` is shown after the first three: ranks whose forward took other branches come to it in other
rounds, and cannot wait for each other there. Weights, optimizer state and cursor change, and
buffers are kept, only after the fourth. A snapshot copies committed state, and is marked only after
the device has done the copy. What is durable rests on marks.

Why a kill between any two lines loses nothing. Before a member has sent 4, nobody passes: all find
the step void, put buffers back, have changed neither weights nor optimizer state nor cursor, and
do the step again; the result has the same bits. After it, some may have heard all and others not:
the former commit what is whole, the latter find it void; the meeting of the next group sends them
the state of those who are further, or all do it again if none of those is left. After the commit
the state is what any run has after this step: where the snapshot of it is whole, it may be used,
whatever has become of the group.

On CPU a call that has returned is done, and what comes over our connections is whole: the gate is
open, and nobody looks at it. The same where there are no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from elastic.worker.base.activity import Activity
from elastic.worker.group.accelerators import DeviceEvent, accelerator_of, record, wait_done
from elastic.worker.reduce.step_metadata import MetadataExchange


class CommitGate:
    """The gate of one reducer."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        activity: Activity,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Be open until there is a group.

        Args:
            parameters: what steps change.
            activity: told when we wait for others.
            is_over: returns whether our group is not whole any more, or is about to be left.
        """
        devices = dict.fromkeys(parameter.device for parameter in parameters)
        self._devices = [one for one in devices if accelerator_of(one) is not None]
        self._activity, self._is_over = activity, is_over
        self._confirmation: MetadataExchange | None = None

    def attach(self, group: Any) -> None:
        """Go on in another group; None for none, or for a group of one."""
        self._confirmation = None
        if self._devices and group is not None:
            self._confirmation = MetadataExchange(group.rank(), group.size(), group, 1)

    def given(self) -> Sequence[DeviceEvent]:
        """Return events behind all that our device was given so far; asked before an exchange."""
        return record(self._devices) if self._confirmation is not None else ()

    def wait_exchanged(self, own: Sequence[DeviceEvent] = ()) -> None:
        """Wait for steps 1 to 3 above; returns at once where the gate is open.

        Args:
            own: what was given before the exchange.

        Raises:
            RuntimeError: the group is over, or the device failed.
        """
        if self._confirmation is None:
            return
        behind = record(self._devices)
        wait_done(own, self._look)
        with self._activity.waiting():
            wait_done(behind, self._look)
        self._look()

    def wait_all(self, own: Sequence[DeviceEvent] = ()) -> None:
        """Wait for all of the above; the step is whole then, on all ranks.

        Raises:
            RuntimeError: the group is over, or the device failed.
        """
        self.wait_exchanged(own)
        if self._confirmation is not None:
            with self._activity.waiting():
                self._confirmation.start([1.0])
                self._confirmation.finish()

    def _look(self) -> None:
        if self._is_over():
            raise RuntimeError(
                "ProcessGroup was aborted, or lost a member, before the device had finished the "
                "exchange of a step: it is done again in the next group"
            )
