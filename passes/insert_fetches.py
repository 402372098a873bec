"""insert_fetches: parameters are brought in by nodes.

Requires: halves whose parameter placeholders are shells.
Ensures: no op but ``fetch`` reads a shell; each layer that uses a parameter fetches it and waits for it right
before the first use.

    mm(x, t(p))     ->     fetch_p = fetch(p, slot);  wait_p = wait(fetch_p);  mm(x, t(wait_p))
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.halves import Halves, ParameterInput, positions
from lohan_fx.plan import Plan


def insert_fetches(halves: Halves, plan: Plan) -> None:
    """Insert ``fetch`` and ``wait`` for each parameter input of each half."""
    del plan
    for _, gm in halves.graphs():
        order = positions(gm.graph)
        for node in gm.graph.find_nodes(op="placeholder"):
            parameter = halves.parameters.get(node.name)
            if parameter is not None:
                for users in _by_layer(node, order):
                    _insert(gm, node, parameter, users)
        annotate(gm)


def _by_layer(node: Node, order: dict[Node, int]) -> list[list[Node]]:
    """The users of ``node`` in order, cut where the layer changes: a tied weight is fetched at both ends."""
    groups: list[list[Node]] = []
    for user in sorted((u for u in node.users if u.op != "output"), key=lambda u: order[u]):
        if groups and meta.cost(groups[-1][-1]).layer == meta.cost(user).layer:
            groups[-1].append(user)
        else:
            groups.append([user])
    return groups


def _insert(gm: GraphModule, shell: Node, parameter: ParameterInput, users: list[Node]) -> None:
    label = parameter.name.replace(".", "_")
    with gm.graph.inserting_before(users[0]):
        fetch = gm.graph.create_node("call_function", ops.FETCH, (shell, parameter.slot), name=f"fetch_{label}")
        wait = gm.graph.create_node("call_function", ops.WAIT, (fetch,), name=f"wait_{label}")
    for node in (fetch, wait):
        node.meta = meta.place_of(users[0])
        node.meta["val"] = shell.meta["val"]
        meta.set_origin(node, parameter.name)
    for user in users:
        user.replace_input_with(shell, wait)
