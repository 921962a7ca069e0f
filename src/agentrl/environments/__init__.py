"""Environments of other projects: tasks, tools and rewards from where they are.

Each kind is a few lines in `environment_kinds`, which run in the interpreter that has the kind's
package (`environment_host`); `environment_process` speaks with it. This room alone starts hosts.
"""

from agentrl.environments.environment_process import EnvironmentProcess
from agentrl.environments.environment_uri import EnvironmentUri

__all__ = ["EnvironmentProcess", "EnvironmentUri"]
