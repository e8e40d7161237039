"""An advisory lock on a file that the system lets go of when its process dies, however it dies.

::

    with path.open("ab") as file:
        if try_lock(file):
            ...  # nobody else has it until the file is closed
"""

from __future__ import annotations

import errno
import sys
from typing import IO

__all__ = ["try_lock"]

# "Another has it", by flock and by the C library of Windows.
_TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK}


def try_lock(file: IO[bytes]) -> bool:
    """Lock an open file until it is closed; return False at once when another has the lock.

    A second handle of the same process counts as another, so threads exclude each other too.

    Raises:
        OSError: The file system knows no locks, as some network file systems.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            # flock and not lockf: POSIX locks do not hold between threads, and closing any
            # other handle of the file would let go of them.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True
