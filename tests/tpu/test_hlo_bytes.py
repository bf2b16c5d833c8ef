"""Test how the bytes of a scheduled program are counted."""

from __future__ import annotations

from tpu import hlo_bytes

# A fusion that reads a slice of its first operand and all of its second; a loop of twelve rounds; a prefetch.
PROGRAM = """
%fused (p: bf16[8,4], q: bf16[2,4]) -> bf16[2,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  %q = bf16[2,4]{1,0} parameter(1)
  %s = bf16[2,4]{1,0} slice(%p), slice={[0:2], [0:4]}
  ROOT %sum = bf16[2,4]{1,0} add(%s, %q)
}

%whole (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  %s = bf16[8,4]{1,0} slice(%p), slice={[0:8], [0:4]}
  ROOT %twice = bf16[8,4]{1,0} add(%s, %p)
}

%body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %p = (s32[], f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %a = f32[16]{0} get-tuple-element(%p), index=1
  %b = f32[16]{0} exponential(%a), metadata={op_name="jit(_step)/transpose(jvp())/checkpoint/write/exp"}
  ROOT %t = (s32[], f32[16]{0}) tuple(%i, %b)
}

%below (p: (s32[], f32[16])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (x: bf16[8,4], y: bf16[2,4], z: f32[16]) -> bf16[2,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = bf16[2,4]{1,0} parameter(1)
  %z = f32[16]{0} parameter(2)
  %f = bf16[2,4]{1,0} fusion(%x, %y), kind=kLoop, calls=%fused, metadata={op_name="jit(_step)/jvp(read)/maps/add"}
  %g = bf16[8,4]{1,0} fusion(%x), kind=kLoop, calls=%whole, metadata={op_name="jit(f)/rematted_computation/read/add"}
  %init = (s32[], f32[16]{0}) tuple(%zero, %z)
  %loop = (s32[], f32[16]{0}) while(%init), condition=%below, body=%body
  %start = (f32[16]{0}, f32[16]{0:S(1)}, u32[]) copy-start(%z)
  %done = f32[16]{0:S(1)} copy-done(%start)
  ROOT %out = bf16[2,4]{1,0} bitcast(%f)
}
"""


def test_bytes_by_scope() -> None:
    """A slice of an operand counts as what is taken of it, unless something else takes all; rounds count each."""
    assert hlo_bytes.bytes_by_scope(PROGRAM) == {
        "backward write": 12 * (64 + 64),
        "recomputed read": 64 + 64,
        "unnamed": 2 * 64,
        "forward maps": 16 + 16 + 16,
    }


def test_scopes() -> None:
    names = {
        "jit(_step)/jvp(read)/maps/mul": "forward maps",
        "jit(_step)/transpose(jvp(jvp()))/checkpoint/rematted_computation/read/squeeze": "recomputed read",
        "jit(_step)/transpose(jvp(jvp()))/checkpoint/feed_forward/dot_general": "backward feed_forward",
        "jit(_step)/readout/mul": "forward other",
        "": "unnamed",
    }
    assert {name: hlo_bytes.scope_of(name) for name in names} == names
