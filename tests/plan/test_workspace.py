"""The workspace of a stage grows with the tokens of a step."""

from swapd.plan.workspace import of_decoder
from tests.plan.omni import QWEN2_5, QWEN3

GIB = 1 << 30


def test_it_grows_with_the_tokens_of_a_step_and_not_without_them() -> None:
    for config in (QWEN3, QWEN2_5):
        at = [of_decoder(config, "thinker", tokens) for tokens in (0, 8192, 16384)]
        assert at[0] == GIB
        assert at[2] - at[1] == at[1] - at[0] > 0


def test_of_experts_those_count_that_a_token_goes_to() -> None:
    decoder = {
        "hidden_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 30,
        "shared_expert_intermediate_size": 10,
    }
    attention = (2 * 4 + 2 * 1) * 25
    experts = 2 * (100 + 30) + 3 * 10
    assert of_decoder(decoder, "a", 7) == GIB + 7 * 2 * (4 * 100 + attention + experts)
    dense = {**decoder, "num_experts_per_tok": None, "intermediate_size": 300}
    assert of_decoder(dense, "a", 7) == GIB + 7 * 2 * (4 * 100 + attention + 3 * 300)
