"""The changes of behaviour that mutants have: comparisons, conditions, dropped statements, locks,
`finally`.
"""

import ast
from collections.abc import Callable, Iterator
from functools import partial

OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,  # codespell:ignore
}
OPPOSITE |= {value: key for key, value in OPPOSITE.items()}

#: Puts other nodes in the place of a node.
Put = Callable[[list[ast.AST]], None]


def changes(node: ast.AST) -> Iterator[list[ast.AST]]:
    """The nodes that may replace a statement or an expression, each with another behaviour."""
    match node:
        case ast.Compare(left, [op], others) if type(op) in OPPOSITE:
            yield [ast.Compare(left, [OPPOSITE[type(op)]()], others)]
        case ast.BoolOp(op, values):
            yield [ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)]
        case ast.Constant(bool(value)):
            yield [ast.Constant(not value)]
        case ast.If(test) | ast.While(test) | ast.IfExp(test) if not isinstance(test, ast.Compare):
            negated = ast.UnaryOp(ast.Not(), test)
            yield [type(node)(**{**dict(ast.iter_fields(node)), "test": negated})]
        case ast.Try(body, [], _, [_, *_] as last):
            yield [*body, *last]
        case ast.Try(body, handlers, orelse, [_, *_] as last):
            yield [ast.Try(body, handlers, orelse, []), *last]
        case ast.ExceptHandler(ast.expr(), name, body):
            yield [ast.ExceptHandler(ast.Tuple([]), name, body)]  # it catches nothing
        case ast.With(items, body) if any(w in ast.unparse(items[0]) for w in ("lock", "suppress")):
            yield [*body]
        case ast.Expr(ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield [ast.Pass()]
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield [ast.Pass()]


def sites(node: ast.AST) -> Iterator[tuple[ast.AST, list[ast.AST], Put]]:
    """Every node of a tree that may change, its replacement, and the function that replaces it.

    Leaves out types, messages, assertions, `__repr__`, and that a class is frozen.
    """
    of_classes = ("keywords",) if isinstance(node, ast.ClassDef) else ()
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", *of_classes):
            continue
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Assert):
                continue
            if getattr(child, "name", "") == "__repr__" or ast.unparse(child).startswith("log."):
                continue
            for new in changes(child):
                yield child, new, partial(_put, node, field, i if isinstance(value, list) else None)
            yield from sites(child)


def _put(node: ast.AST, field: str, i: int | None, new: list[ast.AST]) -> None:
    if i is None:
        setattr(node, field, new[0])
    else:
        getattr(node, field)[i : i + 1] = new
