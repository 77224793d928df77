"""A model that refers to others in the folders beside it, as in a repository of Triton's."""

from adapter.core.model import Role
from tests.packages.staged import ensemble
from tests.unit.packages.looking import PYTHON, look, make, refusal


def calls(folder, *names):
    """Make a python model that calls others by name."""
    made = make(folder)
    (made / "1/model.py").write_text("".join(f"call(model_name='{name}')\n" for name in names))
    return made


def roles(package):
    return {part.own_name: part.role for part in package.parts}


def test_steps_of_ensemble_belong_to_its_package(root):
    """Ensembles of ensembles as well; what no step reaches is not even read."""
    whole = make(root / "whole", ensemble("pre", "inner"))
    make(root / "inner", ensemble("post"))
    make(root / "pre")
    make(root / "post")
    make(root / "unrelated", "this is no config")
    package = look(whole, root, helpers=())
    assert roles(package) == {
        "whole": Role.ENTRY,
        "pre": Role.STEP,
        "inner": Role.STEP,
        "post": Role.STEP,
    }
    assert package.root == str(root)
    of_whole = [path for path in root.rglob("*") if "unrelated" not in str(path)]
    assert package.size_bytes == sum(path.stat().st_size for path in of_whole if path.is_file())


def test_models_called_by_code_belong_along(root):
    main = calls(root / "main", "encoder")
    calls(root / "encoder", "tokenizer", "data")
    make(root / "tokenizer")
    make(root / "unrelated")
    (root / "data").mkdir()
    expected = {"main": Role.ENTRY, "encoder": Role.HELPER, "tokenizer": Role.HELPER}
    assert roles(look(main, root, helpers=())) == expected


def test_helpers_belong_to_the_package_with_their_steps(root):
    """Code may compose a name, which is not found in it."""
    main = make(root / "main")
    make(root / "encoder", ensemble("step"))
    make(root / "step")
    found = roles(look(main, root, helpers=("encoder",)))
    assert found == {"main": Role.ENTRY, "encoder": Role.HELPER, "step": Role.HELPER}


def test_model_without_references_is_its_package(root):
    main = make(root / "main")
    make(root / "other")
    package = look(main, root, helpers=())
    assert package == look(main, root)
    assert package.root == str(main)


def test_a_package_of_several_models_stays_one_package(root):
    package = root / "package"
    make(package / "whole", ensemble("step"))
    make(package / "step")
    make(root / "step")
    assert look(package, root, helpers=()) == look(package, root)


def test_a_helper_that_is_nowhere_is_named(root):
    main = make(root / "main")
    make(root / "encoder")
    (root / "notes").mkdir()
    text = refusal(main, root, helpers=("encoder", "notes"))
    assert "there is no model 'notes' to load along with 'main'" in text
    assert "it holds 'encoder', 'main'" in text


def test_models_beside_are_not_used_for_other_loads(root):
    """SageMaker's and ModelMesh's packages have unrelated ones beside them."""
    whole = make(root / "whole", ensemble("pre"))
    make(root / "pre", PYTHON)
    assert "which is not in the package" in refusal(whole, root)
