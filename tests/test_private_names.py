"""Nobody reaches into another class: a name with an underscore is for its own class and those that are built on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("cluster", "replicas", "scheduler", "benchmarks")

# Public in spite of their names: they are in Python's documentation.
DOCUMENTED = {"os._exit", "sys._current_frames"}
NAMED_TUPLE = {"_replace", "_fields", "_asdict", "_make", "_field_defaults"}

# Of libraries, for want of a public way.
FOREIGN = {
    "handle._init": "Ray Serve: a handle that works without an event loop of its own",
    "worker._global_node": "Ray: which of its own processes have ended",
    "ray.serve.context._get_global_client": "Ray Serve: deploys a whole config with an application's policy",
    "ray.serve.autoscaling_policy._apply_autoscaling_config": "Ray Serve: its default policy as its controller runs it",
    "_AsyncioAuthenticator__task": "pyzmq: whether those that connect are still let in",
    "logging._lock": "logging: its handlers are hidden from an import that would close them",
    "logging._handlerList": "logging: as above",
    "logging._handlers": "logging: as above",
    "torch._dynamo": "torch: the limit of recompilations has no public name",
    "torch._inductor": "torch: which options of the compiler there are",
    "module._forward_hooks": "torch: whether a layer does more than its class says",
    "module._forward_pre_hooks": "torch: as above",
    "module._modules": "torch: a shared layer under each of its names, which named_children leaves out",
    "owner._modules": "torch: as above",
    "model.config._attn_implementation": "transformers: what to put back after another attention",
    "model._keys_to_ignore_on_load_unexpected": "transformers: what a model's authors know to be left over",
    "model._init_weights": "transformers: random weights of one module, as a model's authors have them",
    "model._keep_in_fp32_modules": "transformers: what a model's authors keep exact",
    "_keep_in_fp32_modules_strict": "transformers: as above",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "torch: attention that also says its log-sum-exps",
    "torch._int_mm": "torch: a product of int8, exact in int32",
    "torch._scaled_mm": "torch: a product of fp8; its public name is not in every release that is served with",
    "_supports_attention_backend": "transformers: whether a model's attention can be replaced",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NAMED_TUPLE


class Reaches(ast.NodeVisitor):
    """Collects `x._name` where x is not self, cls or super() and `_name` is not of a class of this file.

    What is known of x by its file alone: a chain of attributes is another class's, and so is an argument whose
    annotation names no class of the file. A local variable is taken to be of the file's class if the name is.
    """

    def __init__(self, tree: ast.Module) -> None:
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self.classes = {node.name for node in classes}
        self.own = {name for node in classes for name in members(node)}
        self.arguments: list[dict[str, ast.expr]] = []
        self.found: set[str] = set()
        self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        self.arguments.append({argument.arg: argument.annotation for argument in arguments if argument.annotation})
        self.generic_visit(node)
        self.arguments.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if is_private(node.attr) and not self.is_at_home(node):
            self.found.add(ast.unparse(node))
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.found |= {f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name)}

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name("getattr" | "setattr" | "hasattr"), args=[_, ast.Constant(str(name)), *_]):
                if is_private(name):
                    self.found.add(name)
        self.generic_visit(node)

    def is_at_home(self, node: ast.Attribute) -> bool:
        match node.value:
            case ast.Name("self" | "cls") | ast.Call(func=ast.Name("super")):
                return True
            case ast.Name(name) if node.attr in self.own:
                annotation = next((known[name] for known in reversed(self.arguments) if name in known), None)
                return annotation is None or bool(names_in(annotation) & (self.classes | {"object", "Any", "Self"}))
        return False


def names_in(annotation: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}


def members(class_: ast.ClassDef) -> Iterator[str]:
    """Names that a class gives its instances or itself."""
    for node in ast.walk(class_):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name("self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name


def reaches(text: str) -> set[str]:
    return Reaches(ast.parse(text)).found


def test_nobody_reaches_into_another_class() -> None:
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in reaches(path.read_text(encoding="utf-8")) - DOCUMENTED:
                found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    assert {name: files for name, files in found.items() if name not in FOREIGN} == {}
    assert FOREIGN.keys() - found.keys() == set(), "nobody needs these any more"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("def f(scheduler): scheduler._ending", {"scheduler._ending"}),
        ("class A:\n def f(self): self.other._name", {"self.other._name"}),
        ("class A:\n def f(self): self._name = self.other._name", {"self.other._name"}),
        ("class A:\n def f(self, other: B): self._name = other._name", {"other._name"}),
        ("class A:\n def f(self, other: A): self._name = other._name", set()),
        ("class A:\n def f(self, other: object): self._name = 1; other._name", set()),
        ("class A:\n def f(self): self._name = 1\ndef g(): a = A(); a._name", set()),
        ("class A(B):\n def f(self): self._of_b = super()._of_b + self._of_b", set()),
        ("class A:\n def f(self):\n  def g(other: B): return other._name\n  self._name = g", {"other._name"}),
        ("getattr(x, '_hidden', None)", {"_hidden"}),
        ("from m import _hidden", {"m._hidden"}),
        ("x.__dict__, x._replace(a=1)", set()),
    ],
)
def test_what_counts_as_reaching(text: str, wanted: set[str]) -> None:
    assert reaches(text) == wanted
