"""Types of layers below `api` that endpoints and commands name in signatures.

For the type checker only: nothing imports this module at run time, where it would load half of Interlock. Endpoints and
commands import no layer below `api`, not for types either.
"""

from interlock.approvals.standing import Standing
from interlock.approvals.ticket import Ticket
from interlock.audit.archive import Tier
from interlock.authority.keys import Algorithm
from interlock.authority.secrets import StoredCredential
from interlock.gateway.fast_path import RunningRead
from interlock.registry.drafts import Stamp
from interlock.registry.version import Version
from interlock.selection.stages import Selector
from interlock.store.port import Reader
from interlock.store.secrets import CredentialEntry
from interlock.store.shared_version import SharedConfig
from interlock.trials import Trial
from interlock.upstreams.client_config import ClientConfig

__all__ = [
    "Algorithm",
    "ClientConfig",
    "CredentialEntry",
    "Reader",
    "RunningRead",
    "Selector",
    "SharedConfig",
    "Stamp",
    "Standing",
    "StoredCredential",
    "Ticket",
    "Tier",
    "Trial",
    "Version",
]
