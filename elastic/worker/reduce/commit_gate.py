"""When a step is final: the device has finished it, and the group was found whole after that.

On CPU a call that has returned is finished, and what arrives over our connections is whole: a rank
that has all it needs from others (sums, buffers, totals of what was logged) commits, unless it has
heard by then that the group is over (`StepEngine._commit`, `Reducer.settle_buffers`). One that has
not finds the step void. So if a rank is killed after the exchange, some may commit and others not.
When the next group forms, the latter receive the state of the former, and the step counts; if none
of the former is left, nor a snapshot of theirs, all do the step again (`core.policy.recovery`),
with the same bits if `consistency` is "bitwise". So a CPU's step passes the gate without waiting,
and so does one without other ranks.

On a device every call returns early: the host has started the exchange of gradients, waited for it,
and could start the optimizer, long before the first byte has arrived. If a member dies then, the
group is aborted, which ends the exchange without an error and with partial sums. So between its
exchange and its optimizer a step passes this gate, in this order:

1. Our device has finished our own part: forward, backward, the script's work on gradients. A rank
   that hangs here makes all others wait in 2, and is detected like any hung rank.
2. Our device has finished the exchange. This is reported as waiting for peers, and given up as soon
   as the group is over, because it may never finish then.
3. Our group is whole: not aborted, no connection lost, no communicator with an error. An abort is
   announced before it begins: if one had ended the exchange, it is visible here.
4. All ranks confirm 3 to all ranks, with a message of the host. A rank that has received all
   confirmations knows that no device is in the exchange any more and that no abort ended it: an
   abort that begins now, anywhere, breaks nothing. (That our group is whole is not enough: an
   aborted sender may have sent us a partial sum.)

`p.grad` is shown after 3: ranks whose forward took other branches reach it in other rounds, and
cannot wait for each other there. Weights, optimizer state and cursor change, and buffers are kept,
only after 4. A snapshot copies committed state, and is marked only after the device has finished
the copy: of two slots in memory the newest that is marked is used.

Why a kill between any two lines loses nothing. Before a member has sent its confirmation, no rank
passes: all find the step void, restore buffers, have changed neither weights nor optimizer state
nor cursor, and repeat the step; the result has the same bits. After it, some ranks may have
received all confirmations and others not: the former commit the step, the latter find it void; when
the next group forms they receive the state of those ahead, or all repeat the step if none of those
is left. After the commit the state is what any run has after this step: a snapshot of it that is
complete may be used, whatever happened to the group.
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
        is_over: Callable[[], bool],
    ) -> None:
        devices = dict.fromkeys(parameter.device for parameter in parameters)
        self._devices = [one for one in devices if accelerator_of(one) is not None]
        self._activity, self._is_over = activity, is_over
        self._confirmation: MetadataExchange | None = None

    def attach(self, group: Any) -> None:
        """Use another group; None without other ranks."""
        self._confirmation = None
        if self._devices and group is not None:
            self._confirmation = MetadataExchange(group.rank(), group.size(), group, 1)

    def record(self) -> Sequence[DeviceEvent]:
        """Return events after all work queued on our devices; call it before an exchange."""
        return record(self._devices) if self._confirmation is not None else ()

    def wait_exchanged(self, own: Sequence[DeviceEvent] = ()) -> None:
        """Wait for steps 1 to 3 above; returns at once where the gate is open.

        Args:
            own: what `record` returned before the exchange.

        Raises:
            RuntimeError: the group is over, or the device failed.
        """
        if self._confirmation is None:
            return
        exchanged = record(self._devices)
        wait_done(own, self._check_group)
        with self._activity.waiting():
            wait_done(exchanged, self._check_group)
        self._check_group()

    def wait_all(self, own: Sequence[DeviceEvent] = ()) -> None:
        """Wait for steps 1 to 4 above; the step is whole then, on all ranks.

        Raises:
            RuntimeError: the group is over, or the device failed.
        """
        self.wait_exchanged(own)
        if self._confirmation is not None:
            with self._activity.waiting():
                self._confirmation.start([1.0])
                self._confirmation.finish()

    def _check_group(self) -> None:
        if self._is_over():
            raise RuntimeError(
                "ProcessGroup was aborted, or lost a member, before the device had finished the "
                "exchange of a step: it is done again in the next group"
            )
