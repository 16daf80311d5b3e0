"""A web server that tests run as a server of a stack: `small_server.py <port> [deaf] [parent] [stray]`.

"deaf" to SIGTERM, "parent" of a child, and that child in a session of its own where it is a "stray".
"""

from __future__ import annotations

import http.server
import signal
import subprocess
import sys

if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "parent" in sys.argv:
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    print("child", subprocess.Popen(command, start_new_session="stray" in sys.argv).pid, flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
