"""What can go wrong at the edges: memory, network, store, live objects.

PlanariaError                (erasure.errors)
├── ErasureError ...         (erasure.errors)
├── RecoveryError ...        (recovery.errors)
├── ConfigError              yours: an option, the job's name, the world size
├── StateError               yours: a value that cannot be carried, or keys that do not match
├── ArenaError               this node's memory
│   ├── ArenaFull            not enough of it; says needed and free bytes
│   └── ArenaBusy            a living process of the same job's name holds it
├── PeerError                a remote rank failed or stayed silent; names it
├── StoreError               the key-value store cannot be reached
└── SaveFailed               one generation was not committed; the older one is whole
"""

from __future__ import annotations

from erasure.errors import PlanariaError


class ConfigError(PlanariaError, ValueError):
    """An option, an environment variable or a world size that cannot be used as given."""


class StateError(PlanariaError, TypeError):
    """A value in the state cannot be carried, or saved and live keys do not match."""


class ArenaError(PlanariaError):
    """The node-local memory cannot be used."""


class ArenaFull(ArenaError):
    """The arena's file system or the machine's memory has too little room."""


class ArenaBusy(ArenaError):
    """Another living process holds this arena."""


class PeerError(PlanariaError):
    """A remote rank failed or did not answer before the deadline."""


class StoreError(PlanariaError):
    """The key-value store cannot be reached."""


class SaveFailed(PlanariaError):
    """A generation was aborted or could not be decided; the older one stays whole."""
