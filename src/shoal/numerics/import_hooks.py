"""Runs an action once a module is imported, without importing it: torch takes a second, and not every command needs
it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[], None]


def when_imported(name: str, action: Action) -> None:
    """Calls `action` at once if the module is imported, else right after its import."""
    found = sys.modules.get(name)
    if found is not None and not getattr(found.__spec__, "_initializing", False):
        action()
        return
    hooks = [finder for finder in sys.meta_path if isinstance(finder, _ImportHook)]
    hook = next((hook for hook in hooks if hook.name == name), None)
    if hook is None:
        hook = _ImportHook(name)
        sys.meta_path.insert(0, hook)
    hook.actions.append(action)


class _ImportHook(MetaPathFinder):
    """Finds one module as the other finders do, and wraps its loader. Leaves `sys.meta_path` with the import."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.actions: list[Action] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader, self)
        return spec

    def imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        actions, self.actions = self.actions, []
        for action in actions:
            action()


class _ActingLoader(Loader):
    """Loads a module as its own loader does, which it then leaves in place, and calls the hook."""

    def __init__(self, loader: Loader, hook: _ImportHook) -> None:
        self._loader, self._hook = loader, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._hook.imported()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
