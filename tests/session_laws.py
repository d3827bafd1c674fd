"""What every session on a GPU holds, whatever runs its graph."""

from __future__ import annotations

import numpy as np

from kvlathe.runtime.device_pages import DevicePages


def pages_move_and_come_back(session: DevicePages) -> None:
    data = bytes(np.random.default_rng(1).integers(0, 255, session.strides[0], np.uint8))
    session.write_page(0, 3, data)
    session.copy_page(0, 3, 5)
    assert session.read_page(0, 5) == data == session.read_page(0, 3)
