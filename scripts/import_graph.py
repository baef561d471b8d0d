"""Print which package imports which, and fail on a cycle or on an import that goes outwards.

    python scripts/import_graph.py

The rings are the library (`hetxl`), the app (`hetxl_train`) and the lab (`hetxl_lab`); imports go inwards only. A unit
of the graph is a package directly below a ring, or a single module there. Imports inside functions count;
those for type checkers alone do not.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RINGS = {"hetxl": ROOT / "src", "hetxl_train": ROOT / "src", "hetxl_lab": ROOT / "lab"}
"""From the innermost to the outermost."""


def modules() -> dict[str, Path]:
    """Return all modules of all rings, with their files."""
    paths = [(folder, path) for ring, folder in RINGS.items() for path in sorted((folder / ring).rglob("*.py"))]
    return {
        ".".join(path.with_suffix("").relative_to(folder).parts).removesuffix(".__init__"): path
        for folder, path in paths
    }


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the rings that a file imports."""
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in known:
                    yield name
                elif node.module in known:
                    yield node.module


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those below `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from _nodes(node)


def unit(module: str) -> str:
    """Return the package or the single module, directly below a ring, that a module belongs to."""
    return ".".join(module.split(".")[:2])


def graph() -> dict[str, set[str]]:
    """Return the units that each unit imports."""
    known = modules()
    edges: dict[str, set[str]] = {unit(name): set() for name in known}
    for name, path in known.items():
        edges[unit(name)] |= {unit(other) for other in imports(path, known)} - {unit(name)}
    return edges


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of units that import each other, directly or not (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return groups


def outward(edges: dict[str, set[str]]) -> list[str]:
    """Return the imports of an outer ring by an inner one."""
    rings = list(RINGS)
    level = {name: rings.index(name.split(".")[0]) for name in edges}
    return [f"{name} → {other}" for name in edges for other in sorted(edges[name]) if level[other] > level[name]]


def main() -> int:
    """Print the graph and what is wrong with it."""
    edges = graph()
    for name, others in edges.items():
        print(f"{name} → {', '.join(sorted(others)) or '–'}")
    for group in cycles(edges):
        print(f"cycle: {', '.join(group)}", file=sys.stderr)
    for edge in outward(edges):
        print(f"outward: {edge}", file=sys.stderr)
    return 1 if cycles(edges) or outward(edges) else 0


if __name__ == "__main__":
    sys.exit(main())
