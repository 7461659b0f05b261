"""Which attributes of which classes the package reads, from its syntax trees and annotations.

A small type inference: the type of an expression is the set of the package's classes that it may be, or hold, taken
from the annotations of parameters, fields and results and followed through assignments, loops and calls. It is neither
complete (an expression without annotations has no type) nor precise (a list of a class counts as the class).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

Function = ast.FunctionDef | ast.AsyncFunctionDef
Types = frozenset[str]
NONE: Types = frozenset()


class Reading:
    """``found``: (class, attribute) of every attribute that is read from an instance of a class, or of a subclass of
    it, outside ``__post_init__``."""

    def __init__(self, trees: Iterable[ast.Module]):
        self.trees = list(trees)
        nodes = [node for tree in self.trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self.classes = {node.name for node in nodes}
        self.bases = {node.name: [base.id for base in node.bases if isinstance(base, ast.Name)] for node in nodes}
        self.attributes: dict[tuple[str, str], Types] = defaultdict(frozenset)  # by class and name
        self.functions: defaultdict[str, Types] = defaultdict(frozenset)  # results, by name
        self.found: set[tuple[str, str]] = set()
        for tree in self.trees:
            for node in ast.walk(tree):
                if isinstance(node, Function):
                    self.functions[node.name] |= self._named(node.returns)
        for _ in range(3):  # attributes that are made from other attributes take another round
            for tree in self.trees:
                self._scan(tree.body, {}, "")

    # ------------------------------------------------------------------------------------------------------ classes

    def lineage(self, name: str) -> list[str]:
        """The class and all its bases."""
        return [name, *(each for base in self.bases.get(name, []) for each in self.lineage(base))]

    def _named(self, annotation: ast.expr | None) -> Types:
        """The package's classes that an annotation mentions."""
        if annotation is None:
            return NONE
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        return frozenset(n.id for n in ast.walk(annotation) if isinstance(n, ast.Name) and n.id in self.classes)

    def _attribute(self, owners: Types, name: str) -> Types:
        return frozenset(t for owner in owners for base in self.lineage(owner) for t in self.attributes[base, name])

    # --------------------------------------------------------------------------------------------------- statements

    def _scan(self, body: list[ast.stmt], outer: dict[str, Types], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                self._class(node, outer)
            elif isinstance(node, Function):
                self._function(node, outer, owner)
            else:
                self._statement(node, outer, owner)

    def _class(self, node: ast.ClassDef, outer: dict[str, Types]) -> None:
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                self.attributes[node.name, each.target.id] |= self._named(each.annotation)
            elif isinstance(each, Function):
                self.attributes[node.name, each.name] |= self._named(each.returns)  # of a property, or a call
                self._function(each, outer, node.name)
            elif isinstance(each, ast.ClassDef):
                self._class(each, outer)

    def _function(self, node: Function, outer: dict[str, Types], owner: str) -> None:
        if node.name == "__post_init__":
            return
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        local = outer | {each.arg: self._named(each.annotation) for each in arguments}
        if owner and arguments and arguments[0].arg == "self":
            local["self"] = frozenset([owner])
        self._scan(node.body, local, owner)

    def _statement(self, node: ast.stmt, local: dict[str, Types], owner: str) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, self._type(node.value, local), local)
        elif isinstance(node, ast.AnnAssign):
            kind = self._named(node.annotation) | (self._type(node.value, local) if node.value else NONE)
            self._bind(node.target, kind, local)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._bind(node.target, self._type(node.iter, local), local)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                kind = self._type(item.context_expr, local)
                if item.optional_vars:
                    self._bind(item.optional_vars, kind, local)
        for value in ast.iter_child_nodes(node):
            if isinstance(value, ast.expr):
                self._type(value, local)
        for field in ("body", "orelse", "finalbody"):
            self._scan(getattr(node, field, []), local, owner)
        for handler in getattr(node, "handlers", []):
            self._scan(handler.body, local, owner)

    def _bind(self, target: ast.expr, kind: Types, local: dict[str, Types]) -> None:
        if isinstance(target, ast.Name):
            local[target.id] = local.get(target.id, NONE) | kind
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._bind(each, kind, local)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, kind, local)
        elif isinstance(target, ast.Attribute):
            for owner in self._type(target.value, local):
                self.attributes[owner, target.attr] |= kind

    # -------------------------------------------------------------------------------------------------- expressions

    def _type(self, node: ast.expr, local: dict[str, Types]) -> Types:
        """The type of an expression; what it reads is noted."""
        if isinstance(node, ast.Name):
            return local.get(node.id, NONE)
        if isinstance(node, ast.Attribute):
            owners = self._type(node.value, local)
            if isinstance(node.ctx, ast.Load):
                self.found |= {(base, node.attr) for owner in owners for base in self.lineage(owner)}
            return self._attribute(owners, node.attr)
        if isinstance(node, ast.Call):
            return self._call(node, local)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            inner = dict(local)
            for generator in node.generators:
                self._bind(generator.target, self._type(generator.iter, inner), inner)
                for condition in generator.ifs:
                    self._type(condition, inner)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return frozenset().union(*(self._type(part, inner) for part in parts))
        if isinstance(node, ast.Lambda):
            inner = {**local, **{each.arg: NONE for each in node.args.args}}
            for each, default in zip(reversed(node.args.args), reversed(node.args.defaults), strict=False):
                inner[each.arg] = self._type(default, local)
            return self._type(node.body, inner)
        if isinstance(node, ast.NamedExpr):
            kind = self._type(node.value, local)
            self._bind(node.target, kind, local)
            return kind
        children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return frozenset().union(*(self._type(child, local) for child in children))

    def _call(self, node: ast.Call, local: dict[str, Types]) -> Types:
        kinds = [self._type(each, local) for each in (*node.args, *(word.value for word in node.keywords))]
        held = frozenset().union(*kinds)
        if isinstance(node.func, ast.Name):
            name = node.func.id
            if name == "translated":  # reads what the class of its first argument declares
                declared = {
                    each for owner in self._kinds(node) for base in self.lineage(owner) for each in self._names(base)
                }
                self.found |= {(base, each) for owner in kinds[1] for base in self.lineage(owner) for each in declared}
            if name in self.classes:
                return frozenset([name])
            return (
                self._kinds(node) | self.functions[name] or local.get(name, NONE) | held
            )  # parse(SampleRun); zip, replace, …
        if isinstance(node.func, ast.Attribute):
            result = self._type(node.func, local) | self.functions.get(node.func.attr, NONE)
            return result | self._type(node.func.value, local)  # values(), items(), build()
        return self._type(node.func, local) | held

    def _kinds(self, node: ast.Call) -> Types:
        """The package's classes among the arguments."""
        return frozenset(each.id for each in node.args if isinstance(each, ast.Name) and each.id in self.classes)

    def _names(self, kind: str) -> set[str]:
        """The attributes that a class declares itself."""
        return {name for owner, name in self.attributes if owner == kind}
