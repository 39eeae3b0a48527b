"""Compiler launcher: runs one compilation and records what it cost.

`launcher.py --log-dir DIR -- COMMAND...` behaves as COMMAND does (output, exit status, death by a
signal) and leaves DIR/<output name>.json. It runs once per translation unit, so it imports
nothing but small parts of the standard library and works as a plain file under `python -I -S`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

_WAITED = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # all but the first go on
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def main(arguments: list[str]) -> int:
    """Runs the command.

    Args:
        arguments: `--log-dir DIR -- COMMAND...`.

    Returns:
        The command's exit status; 127 or 126, as in a shell, if it cannot be run.
    """
    if len(arguments) < 4 or arguments[0] != "--log-dir" or arguments[2] != "--":
        print("usage: launcher.py --log-dir DIR -- COMMAND...", file=sys.stderr)
        return 2
    log_dir, command = arguments[1], arguments[3:]
    begin = time.monotonic()
    # Blocked signals stay pending until sigwait takes them. With handlers, one that arrives just
    # before a blocking wait would not end that wait, and so would not reach the command.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    # A parent may have left it ignored; no SIGCHLD would come then, and no status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        child = os.posix_spawnp(
            command[0], command, os.environ, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    ended = 0
    while not ended:
        number = signal.sigwait(_WAITED)
        if number == signal.SIGCHLD:
            # Counts every descendant that its parent waited for: all stages of nvcc.
            ended, status, usage = os.wait4(child, os.WNOHANG)
        else:
            os.kill(child, number)
    wall = time.monotonic() - begin
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:  # its action cannot be set
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        _note(log_dir, command, usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * 1024)
    return code


def _note(log_dir: str, command: list[str], cpu: float, wall: float, peak: int) -> None:
    output = command[command.index("-o") + 1] if "-o" in command[:-1] else command[-1]
    record = {
        "output": output,
        "cpu_seconds": round(cpu, 3),
        "wall_seconds": round(wall, 3),
        "peak_rss_bytes": peak,  # of the largest process
        "command": command,
    }
    path = os.path.join(log_dir, output.replace("/", "__") + ".json")
    temporary = f"{path}.{os.getpid()}"
    try:
        os.makedirs(log_dir, exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(temporary, path)
    except OSError as error:  # the compilation has succeeded all the same
        print(f"launcher.py: no record of {output}: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
