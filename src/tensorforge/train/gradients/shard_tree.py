"""The fixed binary tree along which the values of shards are added up. Pure.

A node is the half-open range `(low, high)` of the shard numbers below it; it splits at `(low + high) // 2`.
The tree depends on the number of shards alone, not on who computes them. So the same additions happen in the
same order on any number of workers, and floating-point sums are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Generic, TypeVar

from tensorforge.errors import InvalidInputError
from tensorforge.validation import is_whole_number

Node = tuple[int, int]
Value = TypeVar("Value")


class ShardTree:
    """The tree over shards `0 .. shards - 1`."""

    def __init__(self, shards: int) -> None:
        if not is_whole_number(shards) or shards < 1:
            raise InvalidInputError(f"shards = {shards!r}: a tree needs at least one shard")
        self.shards = shards
        self.root: Node = (0, shards)
        self._parents: dict[Node, Node] = {}
        self._map_parents(self.root)

    def _map_parents(self, node: Node) -> None:
        if not is_leaf(node):
            for child in children(node):
                self._parents[child] = node
                self._map_parents(child)

    def __contains__(self, node: object) -> bool:
        return node == self.root or node in self._parents

    def parent(self, node: Node) -> Node | None:
        """The node above; `None` for the root. A range that is no node is an error."""
        if node == self.root:
            return None
        try:
            return self._parents[node]
        except KeyError:
            raise InvalidInputError(
                f"{node} is no node of the tree over {self.shards} shards"
            ) from None

    def merged(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """The fewest nodes with the same shards as disjoint `nodes`: two siblings become their parent."""
        total: TreeSum[None] = TreeSum(self, lambda _left, _right: None)
        for node in nodes:
            total.put(node, None)
        return tuple(sorted(total.parts))

    def merges(self, node: Node, parts: Collection[Node]) -> tuple[list[tuple[Node, bool]], Node]:
        """The siblings among `parts` that `node` joins on its way up the tree, and the node where that ends.

        Each sibling comes with whether it is the left one of the two.
        """
        joined: list[tuple[Node, bool]] = []
        while True:
            parent = self.parent(node)
            if parent is None:
                return joined, node
            left, right = children(parent)
            sibling = right if node == left else left
            if sibling not in parts:
                return joined, node
            joined.append((sibling, sibling == left))
            node = parent

    def fold(self, parts: Mapping[Node, Value], add: Callable[[Value, Value], Value]) -> Value:
        """The value at the root, from the values of nodes that together have all shards, each once."""
        total: TreeSum[Value] = TreeSum(self, add)
        for node, value in parts.items():
            total.put(node, value)
        if set(total.parts) != {self.root}:
            raise InvalidInputError(f"the parts {sorted(parts)} do not make up the whole tree")
        return total.parts[self.root]


class TreeSum(Generic[Value]):
    """A sum along the tree that takes nodes in any order and joins two siblings as soon as both are there.

    If shards are put in order, there is at most one part per level of the tree, as with the digits of a binary
    counter. `add(left, right)` may reuse the memory of either.
    """

    def __init__(self, tree: ShardTree, add: Callable[[Value, Value], Value]) -> None:
        self._tree = tree
        self._add = add
        self.parts: dict[Node, Value] = {}

    def put(self, node: Node, value: Value) -> None:
        """Add the value of `node`. A node that has a shard of an earlier one is an error."""
        for low, high in self.parts:
            if low < node[1] and node[0] < high:
                raise InvalidInputError(f"{node} overlaps {(low, high)}, which is there already")
        merges, node = self._tree.merges(node, self.parts)
        for sibling, is_left in merges:
            other = self.parts.pop(sibling)
            value = self._add(other, value) if is_left else self._add(value, other)
        self.parts[node] = value


def is_leaf(node: Node) -> bool:
    """Whether the node is a single shard."""
    return node[1] - node[0] == 1


def children(node: Node) -> tuple[Node, Node]:
    """The left and the right half of a node that is no leaf."""
    low, high = node
    middle = (low + high) // 2
    return (low, middle), (middle, high)
