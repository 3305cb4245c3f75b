import pytest
import torch
import torch.nn.functional as F
from torch import nn

from precision_time.predictor.walking.walk_module import walk_module

HEADS, TOKENS, WIDTH = 4, 16, 8
ONE = HEADS * TOKENS * WIDTH  # elements of query, key, value or result of a sample
SCORES = HEADS * TOKENS * TOKENS


class Attention(nn.Module):
    def __init__(self, mask=None, **options):
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(3))
        self.register_buffer("mask", mask)
        self.options = options

    def forward(self, tokens):
        query, key, value = (tokens * gain for gain in self.gains)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask, **self.options)


def walk(module, *shape, policy="fp32"):
    return walk_module(
        module, lambda samples: torch.randn(samples, *shape), loss_of=lambda module, batch: module(batch).sum()
    )[policy]


def attend(*args, policy="fp32", **options):
    return walk(Attention(*args, **options), HEADS, TOKENS, WIDTH, policy=policy)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"dropout_p": 0.5}, {"is_causal": True, "dropout_p": 0.1}]
)
def test_fused_attention_keeps_no_scores_whatever_its_options(options):
    counted = attend(**options)
    flops = 2 * SCORES * 2 * WIDTH
    forward, backward = (counted.counts[phase, "attention", "wide"] for phase in ("forward", "backward"))
    assert (forward.flops, backward.flops) == (flops, 2.5 * flops)
    # query, key, value, result and logsumexp; backward the gradient of the result beside them, and three gradients.
    logsumexp = HEADS * TOKENS
    assert forward.bytes == 4 * (4 * ONE + logsumexp)
    # The gradient of a sum is one number, repeated.
    assert (backward.bytes, backward.bytes_fixed) == (4 * (4 * ONE + logsumexp + 3 * ONE), 4)
    assert (forward.ops, backward.ops) == (1, 1)
    assert counted.saved == 4 * (4 * ONE + logsumexp)
    assert counted.scores == SCORES


def test_a_mask_is_read_and_a_learned_one_gets_its_gradient():
    forward = attend(torch.zeros(TOKENS, TOKENS)).counts["forward", "attention", "wide"]
    assert forward.bytes_fixed == 4 * TOKENS * TOKENS

    class Biased(Attention):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(HEADS, TOKENS, TOKENS))

        def forward(self, tokens):
            self.options["attn_mask"] = self.bias
            query, key, value = (tokens * gain for gain in self.gains)
            return F.scaled_dot_product_attention(query, key, value, **self.options)

    learned = walk(Biased(), HEADS, TOKENS, WIDTH)
    plain = attend()
    wide = ("backward", "attention", "wide")
    assert learned.counts[wide].bytes == plain.counts[wide].bytes + 4 * SCORES
    assert learned.gradient_tensors == 4


def test_fused_attention_in_16_bit_reads_16_bit_and_keeps_a_wide_logsumexp():
    counted = attend(policy="amp")
    assert counted.counts["forward", "attention", "narrow"].bytes == 2 * 4 * ONE + 4 * HEADS * TOKENS


def test_grouped_heads_share_keys_and_values():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, tokens):
            few = tokens[:, :2] * self.gain
            return F.scaled_dot_product_attention(tokens * self.gain, few, few, enable_gqa=True)

    counted = walk(Grouped(), HEADS, TOKENS, WIDTH)
    assert counted.total("flops", phase="forward") == 2 * SCORES * 2 * WIDTH
    assert counted.counts["forward", "attention", "wide"].bytes == 4 * (2 * ONE + ONE // 2 + HEADS * TOKENS)


def test_dropout_is_one_kernel_with_a_mask_of_one_byte():
    counted = walk(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), 8)
    assert counted.total("ops", phase="forward", families=["elementwise"]) == 1
    assert counted.total("bytes", phase="forward", families=["elementwise"]) == 8 * (4 + 4 + 1)
    assert counted.saved == 8


class Layers(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, tokens):
        return self.layers(tokens)[0]


STEPS, INPUT, HIDDEN = 5, 16, 32


def test_lstm_runs_as_one_input_product_and_a_product_for_each_step():
    counted = walk(Layers(nn.LSTM(INPUT, HIDDEN, num_layers=2, batch_first=True)), STEPS, INPUT)
    first = 2 * STEPS * 4 * HIDDEN * (INPUT + HIDDEN)
    second = 2 * STEPS * 4 * HIDDEN * (HIDDEN + HIDDEN)
    forward = counted.counts["forward", "recurrent", "wide"]
    assert (forward.flops, forward.ops) == (first + second, 2)
    assert counted.serial_steps == 2 * STEPS
    # The first layer computes no gradient of its input.
    assert counted.total("flops", phase="backward") == 2 * (first + second) - 2 * STEPS * 4 * HIDDEN * INPUT
    # Of each layer: input, output, gates written and read, the reserve for the backward pass, the states in and out.
    reserve = STEPS * 5 * HIDDEN
    layer = STEPS * HIDDEN + 2 * STEPS * 4 * HIDDEN + reserve + 4 * HIDDEN
    assert forward.bytes == 4 * (2 * layer + STEPS * (INPUT + HIDDEN))
    # Weights and biases once, the recurrent weights once more at every further step.
    weights = 4 * HIDDEN * (INPUT + HIDDEN + 2) + 4 * HIDDEN * (HIDDEN + HIDDEN + 2)
    assert forward.bytes_fixed == 4 * (weights + 2 * (STEPS - 1) * 4 * HIDDEN * HIDDEN)


@pytest.mark.parametrize(
    ("layers", "matrices", "steps"),
    [
        (nn.GRU(INPUT, HIDDEN, batch_first=True), 3 * HIDDEN * (INPUT + HIDDEN), STEPS),
        (nn.RNN(INPUT, HIDDEN, batch_first=True), HIDDEN * (INPUT + HIDDEN), STEPS),
        (nn.LSTM(INPUT, HIDDEN, batch_first=True, bidirectional=True), 2 * 4 * HIDDEN * (INPUT + HIDDEN), STEPS),
        (
            nn.LSTM(INPUT, HIDDEN, batch_first=True, proj_size=8),
            4 * HIDDEN * (INPUT + 8) + 8 * HIDDEN,
            STEPS,
        ),
    ],
)
@pytest.mark.parametrize("policy", ["fp32", "amp"])
def test_other_recurrent_layers(layers, matrices, steps, policy):
    counted = walk(Layers(layers), STEPS, INPUT, policy=policy)
    kind = "narrow" if policy == "amp" else "wide"
    assert counted.counts["forward", "recurrent", kind].flops == 2 * STEPS * matrices
    assert counted.serial_steps == steps
    assert counted.gradient_tensors == len(list(layers.parameters()))


class Loop(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, tokens):
        state = None
        for step in tokens.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize(("cell", "gates"), [(nn.LSTMCell(INPUT, HIDDEN), 4), (nn.GRUCell(INPUT, HIDDEN), 3)])
def test_a_loop_of_cells_waits_at_every_step(cell, gates):
    counted = walk(Loop(cell), STEPS, INPUT)
    products = gates * HIDDEN * (INPUT + HIDDEN)
    assert counted.total("flops", phase="forward") == 2 * STEPS * products
    assert counted.serial_steps == STEPS
    assert counted.total("ops", phase="forward", families=["dense", "recurrent"]) == 3 * STEPS
    assert counted.gradient_tensors == 4
    # Neither the input nor the first hidden state gets a gradient.
    expected = 2 * STEPS * products + 2 * gates * HIDDEN * HIDDEN * (STEPS - 1)
    assert counted.total("flops", phase="backward") == expected


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(INPUT, HIDDEN, batch_first=True)

    def forward(self, tokens):
        lengths = torch.full((len(tokens),), STEPS)
        packed = nn.utils.rnn.pack_padded_sequence(tokens, lengths, batch_first=True)
        return self.layers(packed)[0].data


def test_packed_sequences_take_the_steps_of_the_longest():
    counted = walk(Packed(), STEPS, INPUT)
    assert counted.total("flops", phase="forward") == 2 * STEPS * 4 * HIDDEN * (INPUT + HIDDEN)
    assert counted.serial_steps == STEPS


def test_the_paths_of_a_cpu_are_back_after_a_walk():
    walk(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), 8)
    attend()
    tokens = torch.randn(1, 1, 4, 8, requires_grad=True)
    out = F.scaled_dot_product_attention(tokens, tokens, tokens)
    assert out.abs().sum() > 0
    assert type(out.grad_fn).__name__ == "ScaledDotProductFlashAttentionForCpuBackward0"
    assert type(F.dropout(tokens).grad_fn).__name__ == "MulBackward0"
    assert nn.LSTM(8, 8)(torch.randn(2, 1, 8))[0].abs().sum() > 0
