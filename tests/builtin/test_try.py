import pytest
from tests.builtin.doors import Door, on_either, path_of
pytestmark = [pytest.mark.triton, pytest.mark.builtin]

@on_either
def test_line(door):
    door.put("x", door.model())
    r = door.invoke("x")
    print(r.status, r.body, door.listed(), door.get("x").body)
    print(door.processes())
    print(door.delete("x").status)
