"""Environments of other projects: their tasks, tools and rewards.

Each kind is a small class in `environment_kinds`, which runs in the interpreter that has the kind's
package (`environment_host`); `environment_process` communicates with it. Only this package starts
hosts.
"""

from agentrl.plugins.environments.environment_process import EnvironmentProcess
from agentrl.plugins.environments.environment_uri import EnvironmentUri

__all__ = ["EnvironmentProcess", "EnvironmentUri"]
