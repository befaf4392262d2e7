"""What all environments of other libraries have in common: packages, versions, the contract."""

import re
import sys

import pytest

from ragen.config.extensions import ENV, load
from ragen.core.errors import RagenError
from ragen.envs.adapters.adapted import version_of
from ragen.envs.registry import make


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [
        ("minigrid", "gymnasium:MiniGrid-Nothing-v0", "minigrid"),
        ("reasoning_gym", "reasoning-gym:no_such_task", "reasoning-gym"),
        ("textarena", "textarena:NoSuchGame-v0", "textarena"),
        ("websockets", "openenv:http://127.0.0.1:9", "openenv"),
    ],
)
def test_without_its_package_a_name_tells_its_extra(monkeypatch, module, name, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RagenError, match=re.escape(f"pip install 'ragen-rl[{extra}]'")):
        make(name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("gymnasium", "gymnasium:FrozenLake-v1"),
        ("reasoning_gym", "reasoning-gym:gcd"),
        ("textarena", "textarena:TicTacToe-v0"),
    ],
)
def test_the_version_of_the_package_identifies_the_code(module, name):
    pytest.importorskip(module, reason="needs an extra")
    assert load(name, ENV).source == version_of(module)
