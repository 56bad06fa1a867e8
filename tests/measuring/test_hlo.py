# SPDX-License-Identifier: Apache-2.0
"""Reading compiled programs: texts as the TPU compiler writes them, shortened."""

import re

import pytest

from bertjax.measuring import estimates, hlo
from bertjax.parallel.chips import CHIPS, Chip

COST = '"window_config":{"estimated_cycles":"%d","estimated_bundle_count":"0"}'
MODULE = """\
HloModule jit_update, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(128)} parameter(0)
  ROOT %inner = f32[8]{0:T(128)} multiply(%p, %p), backend_config={"x":"1"}
}

%all-reduce-scatter.1 (p.1: f32[64]) -> f32[8] {
  %p.1 = f32[64]{0:T(128)} parameter(0)
  %all-reduce.7 = f32[64]{0:T(128)} all-reduce(%p.1), channel_id=7, to_apply=%add
  %c.1 = s32[]{:T(128)} constant(8)
  ROOT %cut = f32[8]{0:T(128)} dynamic-slice(%all-reduce.7, %c.1)
}

%wide.cond (w: (s32[], f32[8])) -> pred[] {
  %bound = s32[]{:T(128)} constant(12)
  %w = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%w), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %bound), direction=LT, metadata={op_name="x"}
}

%body (v: (s32[], f32[8])) -> (s32[], f32[8]) {
  %v = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(128)}) parameter(0)
  %x = f32[8]{0:T(128)} get-tuple-element(%v), index=1
  %one = f32[8]{0:T(128)S(1)} fusion(%x), kind=kLoop, calls=%fused, backend_config={C10}
  %all-reduce.2 = (f32[8]{0:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) \
all-reduce(%one, %one), channel_id=2, to_apply=%add
  %shard = f32[8]{0:T(128)} fusion(%one), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %out = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%i.1, %shard)
}

%cheap (q: f32[8]) -> f32[8] {
  %q = f32[8]{0:T(128)} parameter(0)
  ROOT %f1 = f32[8]{0:T(128)} fusion(%q), kind=kLoop, calls=%fused, backend_config={C1}
}

%dear (q.1: f32[8]) -> f32[8] {
  %q.1 = f32[8]{0:T(128)} parameter(0)
  ROOT %f2 = f32[8]{0:T(128)} fusion(%q.1), calls=%fused, backend_config={C5}
}

ENTRY %main (p.9: f32[8]) -> f32[8] {
  %p.9 = f32[8]{0:T(128)} parameter(0)
  %gather = (f32[8]{0:T(128)}, f32[64]{0:T(128)}) all-gather-start(%p.9), dimensions={0}
  %gathered = f32[64]{0:T(128)} all-gather-done(%gather)
  %while.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%init), condition=%wide.cond, \
body=%body, backend_config={"flag_configs":[]}
  %while.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%init), condition=%other, \
body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %either = f32[8]{0:T(128)} conditional(%flag, %p.9, %p.9), \
branch_computations={%cheap, %dear}
  ROOT %last = f32[8]{0:T(128)} fusion(%either), kind=kLoop, calls=%fused, \
backend_config={C100}
}
"""
for number in (100, 10, 5, 1):
    MODULE = MODULE.replace(f"{{C{number}}}", "{" + COST % number + "}")

KERNELS = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (q: bf16[2,4,512,64]) -> bf16[2,4,512,64] {
  %q = bf16[2,4,512,64]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %splash_mha_fwd_segmented_residuals.1 = (bf16[2,4,512,64]{3,2,1,0:T(8,128)S(1)}, \
f32[2,4,512,128]{3,2,1,0:T(8,128)S(1)}) custom-call(%mask, /*index=5*/%q, %q, %q), \
custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,2,2]{2,1,0}, \
bf16[2,4,512,64]{3,2,1,0}, bf16[2,4,512,64]{3,2,1,0}, bf16[2,4,512,64]{3,2,1,0}}, \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 256}"
}}, metadata={op_name="jit(step)/splash"}, \
backend_config={"custom_call_config":{"body":"x"}}
  %splash_mha_dkv_segmented_no_residuals.1 = (bf16[2,2,4,512,64]{4,3,2,1,0}, \
bf16[2,4,512,64]{3,2,1,0}, bf16[2,4,512,64]{3,2,1,0}) custom-call(%q, %q, %q, %q), \
custom_call_target="tpu_custom_call", operand_layout_constraints={\
bf16[2,4,512,64]{3,2,1,0}, bf16[2,4,512,64]{3,2,1,0}, bf16[2,4,512,64]{3,2,1,0}, \
bf16[2,4,512,64]{3,2,1,0}}, frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(step)/splash"}
  %fused_attention.2 = bf16[2,512,256]{2,1,0:T(8,128)(2,1)} custom-call(%q), \
custom_call_target="tpu_custom_call", operand_layout_constraints={\
bf16[2,512,256]{2,1,0}}, metadata={op_name="jit(step)/fused"}, backend_config=\
{"custom_call_config":{"body":"AAAA","cost_estimate":{"flops":"5000","transcendentals"\
:"7","bytes_accessed":"9000","remote_bytes_transferred":"0"}}}
  ROOT %buffer = bf16[2,4,512,64]{3,2,1,0} custom-call(), \
custom_call_target="AllocateBuffer"
}
"""


def test_loops_count_as_often_as_they_run():
    program = hlo.read(MODULE)
    walked = [(i, name) for i, _, name in hlo.walk(program) if i.op == "while"]
    trips = {i.name: hlo.trip_count(program, i, name) for i, name in walked}
    assert trips == {"while.1": 12, "while.2": 3}
    # Two loops of 10 cycles, the more expensive branch, the last operation.
    assert hlo.cycles(program) == (12 + 3) * 10 + 5 + 100
    assert hlo.unknown_loops(program) == []


def test_counters_begin_anywhere_and_step_by_more_than_one():
    """As in loops that multiply parts of a matrix while other parts arrive."""
    text = MODULE.replace("s32[]", "u32[]")
    text = text.replace("tuple(%i.1, %shard)", "tuple(%next, %shard)")
    step = "  %two = u32[] constant(2)\n  %next = u32[]{:T(128)} add(%i.1, %two)\n"
    text = text.replace("  ROOT %out", f"{step}  ROOT %out")
    begin = "  %four = u32[] constant(4)\n  %copy.4 = u32[] copy(%four)\n"
    begin += "  %init = (u32[], f32[8]{0}) tuple(%copy.4, %p.9)\n"
    program = hlo.read(text.replace("  %while.1", f"{begin}  %while.1"))
    (loop,) = (i for i, _, _ in hlo.walk(program) if i.name == "while.1")
    assert hlo.trip_count(program, loop, "main") == (12 - 4) / 2


def test_elements_of_tuples_may_be_named_by_number():
    """As in the text that the compiler writes before it generates machine code."""
    compiled = hlo.read(MODULE)
    text = re.sub(r"  %(i|x) = [^\n]*\n", "", MODULE)
    text = text.replace("compare(%i,", "compare(%w#0,").replace(
        "fusion(%x)", "fusion(%v#1)"
    )
    early = hlo.read(text)
    assert early != compiled and hlo.cycles(early) == hlo.cycles(compiled)
    assert hlo.unknown_loops(early) == []
    added = {k: i for part in early.computations.values() for k, i in part.items()}
    assert added["v#1"].shape == "/*index=1*/f32[8]{0:T(128)}"
    # The bytes are those of the element, not the tuple.
    text = MODULE.replace("all-gather-start(%p.9)", "all-gather-start(%while.0#1)")
    loop = "  %while.0 = (f32[99]{0}, f32[8]{0}) custom-call(%p.9)\n  %gather ="
    found = hlo.collectives(hlo.read(text.replace("  %gather =", loop)))
    assert found["all-gather"] == {"count": 1, "bytes": 64 * 4}


def test_a_collective_that_several_fusions_carry_on_counts_once():
    carry = (
        "%carry.N (p.5: f32[8]) -> f32[64] {\n"
        "  %p.5 = f32[8]{0:T(128)} parameter(0)\n"
        "  ROOT %all-gather.N = f32[64]{0} all-gather(%p.5), channel_id=9\n}\n\n"
    )
    twice = carry.replace("N", "1") + carry.replace("N", "2")
    text = MODULE.replace("ENTRY", f"{twice}ENTRY")
    for n in (1, 2):
        more = f"  %step.{n} = f32[64]{{0}} fusion(%p.9), calls=%carry.{n}\n"
        text = text.replace("  ROOT %last", f"{more}  ROOT %last")
    found = hlo.collectives(hlo.read(text))
    assert found["all-gather"] == {"count": 2, "bytes": 2 * 64 * 4}


def test_a_loop_without_a_bound_is_named():
    text = MODULE.replace("constant(12)", "parameter(1)")
    program = hlo.read(text)
    assert hlo.unknown_loops(program) == ["while.1"]
    assert hlo.cycles(program) == (1 + 3) * 10 + 5 + 100


def test_collectives_by_kind_with_bytes():
    found = hlo.collectives(hlo.read(MODULE))
    assert found == {
        "all-gather": {"count": 1, "bytes": 64 * 4},  # start and done count once
        "all-reduce": {"count": 15, "bytes": 15 * (8 * 4 + 32 * 2)},
        "reduce-scatter": {"count": 15, "bytes": 15 * 64 * 4},  # the larger side
    }


def test_kernels_and_what_they_say_they_cost():
    forward, backward, fused = hlo.kernels(hlo.read(KERNELS))
    one = 2 * 4 * 512 * 64
    assert forward.name.startswith("splash_mha_fwd") and forward.flops is None
    assert forward.touched == 4 + 4 * one * 2 + 2 * 4 * 512 * 128 * 4
    assert forward.shapes[1] == (2, 4, 512, 64)
    assert backward.touched == (4 + 2 + 2) * one * 2
    assert (fused.flops, fused.moved, fused.times) == (5000.0, 9000.0, 1)


def test_splash_attention_is_costed_by_its_shapes():
    forward, backward, fused = hlo.kernels(hlo.read(KERNELS))
    rows, heads, length, width = 2, 4, 512, 64
    square = rows * heads * length**2 * width
    chip = Chip(tflops=1, hbm_gbps=10**9)  # memory so fast that it does not limit
    assert estimates.kernel_seconds([forward], chip) == pytest.approx(
        4 * square / 0.5e12
    )
    assert estimates.kernel_seconds([backward], chip) == pytest.approx(
        10 * square / 0.5e12
    )
    # A query sees a quarter of the keys, in the mean over layers.
    seen = estimates.kernel_seconds([forward], chip, share=0.25)
    assert seen == pytest.approx(square / 0.5e12)
    slow = Chip(tflops=10**9, hbm_gbps=1)
    assert estimates.kernel_seconds([fused], slow) == pytest.approx(9000 / 0.8e9)


def test_one_table_of_chips():
    for kind, chip in CHIPS.items():
        if not chip.ghz:
            continue
        # Matrix units do a power of two times 128 x 128 operations per cycle.
        cycle = chip.flops / (1e9 * chip.ghz) / (2 * 128 * 128)
        assert min(abs(cycle - n) / n for n in (4, 8, 16)) < 0.01, kind
        assert chip.hbm_gib > 15 and chip.hbm_gbps > 800
