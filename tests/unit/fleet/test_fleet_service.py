from __future__ import annotations

import pytest

from thunderagent_sim.fleet.service import FITTED, Service, ServiceError, load_service


def written(tmp_path, text: str):
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    return path


def test_what_a_file_leaves_out_is_as_fitted(tmp_path):
    service = load_service(written(tmp_path, "blocks: 5000\n"))
    assert service == FITTED.model_copy(update={"blocks": 5000})


def test_an_empty_file_is_the_fitted_engine(tmp_path):
    assert load_service(written(tmp_path, "# nothing yet\n")) == FITTED


def test_the_footprint_is_taken_off_the_cache():
    service = Service(blocks=1000, block_size=16, footprint=1.6)
    assert service.usable_blocks == 625
    assert service.capacity_tokens == 10_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blocks: 10\nfootprint: 0.5\n", ":2: footprint: must be at least 1, not 0.5"),
        ("blocks: many\n", ":1: blocks: must be a whole number, not 'many'"),
        ("step_seconds: 0.0\n", ":1: step_seconds: must be above 0, not 0.0"),
        ("block: 10\n", ":1: block: unknown field; did you mean blocks?"),
        ("- 1\n", ":1: must be a mapping of fields, such as blocks: 139815"),
        ("blocks: [\n", ":2: is not valid YAML"),
        ("max_batched_tokens: 8\nmax_num_seqs: 9\n", ":2: max_num_seqs: must not be above max_batched_tokens, 8"),
    ],
)
def test_a_bad_value_is_named_with_file_line_and_field(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ServiceError) as error:
        load_service(path)
    assert str(error.value).startswith(f"{path}{message}")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ServiceError, match="cannot be read: Is a directory"):
        load_service(tmp_path)
