"""How many rollouts a sampler plays at once: as many as the servers' reported load allows.

Additive increase and multiplicative decrease (Chiu and Jain 1989), as TCP finds its window: it
settles around what the servers take, whatever that is, and samplers that know nothing of each other
come to equal shares of it. Until the servers are first pressed, the limit doubles (slow start).
"""

from agentrl.inference.client.load_balancing import Pressure

START_PER_SERVER = 8
UNKNOWN_PER_SERVER = 64
"""Per server where none tells how busy it is."""
_DECREASE = 0.75


class ConcurrencyLimit:
    """The limit of one sampler process; ask after every look at the servers.

    Args:
        per_server: rollouts per server, fixed; None: as the servers' load allows.
    """

    def __init__(self, per_server: int | None) -> None:
        self.current = 0
        """The limit as it was last asked for."""
        self._per_server = per_server
        self._limit = 0.0
        self._is_starting = True
        self._num_reports = 0

    def of(self, pressure: Pressure, *, num_servers: int, num_running: int, most: int) -> int:
        """Return how many rollouts may be played now.

        Args:
            pressure: what the servers report.
            num_servers: that take requests.
            num_running: rollouts that are played now.
            most: never more than this.
        """
        num_servers = max(1, num_servers)
        if self._per_server is not None:
            limit = self._per_server * num_servers
        elif not pressure.is_known:
            limit = UNKNOWN_PER_SERVER * num_servers
        else:
            self._limit = min(self._limit or START_PER_SERVER * num_servers, most)
            if pressure.num_reports != self._num_reports:
                self._num_reports = pressure.num_reports
                self._adjust(pressure, num_servers, num_running)
            limit = int(self._limit)
        self.current = min(most, limit)
        return self.current

    def _adjust(self, pressure: Pressure, num_servers: int, num_running: int) -> None:
        """Change the limit after a report, if what it was changed to before has taken effect."""
        if pressure.is_general:
            self._is_starting = False
            if num_running <= self._limit:
                self._limit = max(1.0, self._limit * _DECREASE)
        elif num_running >= int(self._limit) and not pressure.is_coming:
            self._limit += self._limit if self._is_starting else num_servers
