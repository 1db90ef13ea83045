"""Who has which address: node n is .n on each network, the switch .254."""

from __future__ import annotations

NETWORKS = {"control": "10.77.0", "bulk": "10.77.1"}
"""Networks by name. A node's interface eth0 is on the first, eth1 on the second."""
INTERFACES = {network: f"eth{index}" for index, network in enumerate(NETWORKS)}
NODES_MAX = 63
SWITCH = 254
STORE_ADDRESS = f"{NETWORKS['control']}.{SWITCH}"
NUMBERS = (*range(1, NODES_MAX + 1), SWITCH)


def hardware_address(network: str, number: int) -> str:
    """Return what a node's interface on a network is called on the wire."""
    return f"02:00:00:00:{list(NETWORKS).index(network):02x}:{number:02x}"


def hosts() -> str:
    """Return the /etc/hosts of every node: torch asks for the name of each address it meets."""
    lines = ["127.0.0.1 localhost"]
    for network, subnet in NETWORKS.items():
        lines += [f"{subnet}.{number} {network}-{number}" for number in NUMBERS]
    return "\n".join(lines) + "\n"
