"""What can go wrong with a bed, in words for its user."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class BedError(RuntimeError):
    """The bed cannot be built or does not do what it should; the message says why and what to do."""


@contextmanager
def explained(what: str, module: str | None = None) -> Iterator[None]:
    """Say what a refusal of the kernel means.

    Args:
        what: is being made.
        module: of the kernel that makes it, if it is one that can be loaded.
    """
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        yield
    except (OSError, NetlinkError) as error:
        code = error.code if isinstance(error, NetlinkError) else error.errno
        if code in (errno.EPERM, errno.EACCES):
            raise BedError(
                f"making {what} is not permitted: run as root; in a container, give it --privileged "
                "(CAP_SYS_ADMIN and CAP_NET_ADMIN)"
            ) from error
        if code in (errno.ENOENT, errno.EOPNOTSUPP):
            load = f"load its module (modprobe {module}), or " if module else ""
            raise BedError(f"this kernel cannot make {what}: {load}use a machine that can") from error
        raise BedError(f"making {what}: {error}") from error
