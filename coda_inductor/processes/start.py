# SPDX-License-Identifier: Apache-2.0
"""How a child begins: ``python -I start.py PARENT MODULE ARGUMENT...``, run by path by ``child``.

Standard input is the connection to the parent, whose ``sys.path`` is the first message; this
package is imported from the folder of this file, independent of that path. Then
``MODULE.main(connection, *arguments)`` runs. Once the parent is gone, the child's tree is killed.
"""

import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_LOOK = 0.5  # seconds between two checks for the parent


class Messages(Connection):
    """A connection for JSON, so that messages cannot contain code."""

    def send(self, obj: Any) -> None:
        self.send_bytes(json.dumps(obj).encode())

    def recv(self) -> Any:
        return json.loads(self.recv_bytes())


def _import_package() -> None:
    """Import exactly the package of this file, whatever its name leads to on the path."""
    spec: Any = importlib.util.spec_from_file_location(_PACKAGE.name, _PACKAGE / "__init__.py")
    sys.modules[_PACKAGE.name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os.killpg(0, signal.SIGKILL)  # the child leads a group of its own


def main(parent: int, module: str, *arguments: str) -> None:
    """Run the child. ``parent``: the parent's process id."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    messages = Messages(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        sys.path[:] = messages.recv()
        _import_package()
        importlib.import_module(module).main(messages, *arguments)
        code = 0
    except EOFError:
        os.killpg(0, signal.SIGKILL)  # the parent is gone
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # an orderly exit of the interpreter takes a second


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
