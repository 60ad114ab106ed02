"""Whether the picker or the operator of this container works: the exit status of a Docker HEALTHCHECK.

Kubernetes looks at no such thing; the chart's probes do the same there. Each command has its pages on a port of its
own, and one container runs one command.
"""

import http.client
import sys

PORTS = (9090, 9091)
"""Of the picker and of the operator, as they are by default."""


def healthy(port: int) -> bool | None:
    """What ``/healthz`` says; None where nothing listens."""
    connection = http.client.HTTPConnection("localhost", port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.client.OK
    except ConnectionRefusedError:
        return None
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    said = {healthy(port) for port in PORTS} - {None}
    sys.exit(0 if said == {True} else 1)
