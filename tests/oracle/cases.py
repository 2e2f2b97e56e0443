"""The problems that tests send: tables of cases, most of them from public bug reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .case import Case, Layouts, Override, Ring


@dataclass(frozen=True, kw_only=True)
class RuntimeCase:
    """A procedure that is more than one call: what to do, and what must hold."""

    name: str
    theme: str
    steps: str
    must: str


def _case(name: str, theme: str, **given: Any) -> Case:
    """A case whose sizes follow from one another where they are not given."""
    for side in ("q", "k"):
        lengths = given.get(f"seqlens_{side}")
        if lengths is not None:
            given |= {"batch_size": len(lengths), f"seqlen_{side}": max(lengths, default=0)}
    given.setdefault("seqlen_q", 128)
    given.setdefault("seqlen_k", given["seqlen_q"])
    given.setdefault("num_heads_kv", given.get("num_heads_q", 2))
    given.setdefault("head_dim_v", given.get("head_dim", 64))
    return Case(name=name, theme=theme, **given)


# A case reads as a paragraph; one argument a line would bury its name.
# fmt: off
CASES = (
    # ---- NaN and numerics
    _case("single_token_d16_fp16", "NAN", seqlen_q=1, num_heads_q=1, head_dim=16, dtype="fp16", q_mul=3.0,
          k_mul=3.0, v_mul=3.0, special=("large_logits", "dO_ones"),
          note="one key: dQ = dK = 0 up to rounding, dV = dO"),
    _case("varlen_q_long_k1_causal", "NAN", seqlens_q=(76, 34, 146), seqlens_k=(1, 1, 1), num_heads_q=1,
          head_dim=32, dtype="fp16", causal=True, q_mul=3.0, k_mul=3.0, v_mul=3.0,
          special=("neg_inf_rows", "large_logits", "dO_ones"), checks=("ZERO_ROWS",)),
    _case("neg_lse_s192", "NAN", batch_size=2, seqlen_q=192, neg_target=130.0,
          special=("very_negative_logits",),
          note="s % 128 = 64 and LSE < -ln(FLT_MAX): exp(0 - lse) of a padded key overflows fp32"),
    _case("sq1_sk128_neg_lse", "NAN", seqlen_q=1, seqlen_k=128, neg_target=150.0,
          special=("very_negative_logits",)),
    _case("seqused_k_nan_beyond", "NAN", batch_size=4, seqlen_q=16, seqlen_k=128, seqused_k=(32, 64, 96, 48),
          num_heads_q=4, num_heads_kv=2, special=("poison_unused",), checks=("ZERO_ROWS",)),
    _case("varlen_rows_behind_last_offset", "NAN", seqlens_q=(37, 91), seqlens_k=(37, 91), tail_q=60,
          tail_k=60, causal=True, special=("poison_unused", "prefill_out_nan"), checks=("ZERO_ROWS",)),
    _case("raw_logits_below_minus_5e4", "NAN", seqlen_q=64, seqlen_k=96, num_heads_q=4, num_heads_kv=1,
          head_dim=128, neg_target=6000.0, special=("very_negative_logits",),
          note="QK near -6.8e4 before scaling; fp32 LSE has ulp 5e-4 here, error_budget() knows"),
    _case("ties_and_common_mean_bias", "NAN", seqlen_q=256, causal=True, special=("ties", "mean_shift"),
          checks=("BIAS",)),
    # ---- zero lengths and empty batches
    _case("varlen_zero_q_hd256_mqa", "ZERO", seqlens_q=(0, 75, 53, 0), seqlens_k=(159, 109, 53, 192),
          num_heads_q=4, num_heads_kv=1, head_dim=256, special=("zero_len",),
          checks=("ZERO_ROWS", "NO_HANG")),
    _case("varlen_zero_q_middle", "ZERO", seqlens_q=(150, 0, 150), seqlens_k=(100, 100, 100),
          special=("zero_len",), checks=("ZERO_ROWS",)),
    _case("dense_sk0", "ZERO", batch_size=2, seqlen_q=64, seqlen_k=0, num_heads_q=4, num_heads_kv=2,
          special=("zero_len", "neg_inf_rows"), checks=("ZERO_ROWS",)),
    _case("dense_sk0_causal", "ZERO", batch_size=2, seqlen_q=64, seqlen_k=0, num_heads_q=4, num_heads_kv=2,
          causal=True, special=("zero_len", "neg_inf_rows"), checks=("ZERO_ROWS",)),
    _case("dense_batch0", "ZERO", batch_size=0, seqlen_q=395, seqlen_k=16, num_heads_q=10, dtype="fp16",
          special=("zero_len",)),
    # ---- packed sides and seqused
    _case("seqused_both_dense", "VARLEN", batch_size=3, seqlen_q=96, seqlen_k=160, seqused_q=(96, 0, 33),
          seqused_k=(160, 80, 1), num_heads_q=4, num_heads_kv=2, head_dim=128,
          special=("prefill_out_nan", "zero_len"), checks=("ZERO_ROWS",)),
    _case("packed_q_dense_k_seqused", "VARLEN", seqlens_q=(40, 1, 97), seqlen_k=96, seqused_k=(96, 13, 64),
          num_heads_q=4, num_heads_kv=2, causal=True, special=("neg_inf_rows",), checks=("ZERO_ROWS",)),
    _case("varlen_tile_straddle", "VARLEN", seqlens_q=(63, 65, 127, 129, 1), seqlens_k=(129, 1, 64, 127, 65),
          causal=True, special=("neg_inf_rows",), checks=("ZERO_ROWS",)),
    _case("err_seqlen_exceeds_max", "VARLEN", seqlens_q=(40, 100), seqlens_k=(40, 100),
          override=Override(max_seqlen_k=64), expect="INVALID_ARGUMENT"),
    _case("err_cu_decreasing", "VARLEN", seqlens_q=(40, 24), seqlens_k=(40, 24),
          override=Override(cu_seqlens_k=(0, 70, 64)), expect="INVALID_ARGUMENT"),
    _case("err_cu_wrong_count", "VARLEN", seqlens_q=(40, 24), seqlens_k=(40, 24),
          override=Override(cu_seqlens_k=(0, 20, 40, 64)), expect="INVALID_ARGUMENT"),
    # ---- grouped heads
    _case("gqa_12_3_dv128", "GQA", seqlen_q=100, seqlen_k=130, num_heads_q=12, num_heads_kv=3,
          head_dim_v=128, note="group size 4 differs from kv head count 3"),
    _case("mqa_71_1", "GQA", seqlen_q=48, num_heads_q=71, num_heads_kv=1, dtype="fp16", causal=True),
    _case("varlen_gqa_16_8_d64", "GQA", seqlens_q=(64, 64, 64, 64), seqlens_k=(64, 64, 64, 64),
          num_heads_q=16, num_heads_kv=8, checks=("NO_HANG",)),
    _case("mqa_5_1_odd_heads_sk_tail", "GQA", batch_size=2, seqlen_q=33, seqlen_k=97, num_heads_q=5,
          num_heads_kv=1, head_dim=96, causal=True),
    _case("err_heads_not_divisible", "GQA", seqlen_q=32, num_heads_q=3, num_heads_kv=2,
          expect="INVALID_ARGUMENT"),
    # ---- determinism and races
    _case("det_mha_s512", "DET", seqlen_q=512, num_heads_q=4, head_dim=128, deterministic=True,
          checks=("BITWISE",)),
    _case("det_local_window", "DET", batch_size=2, seqlen_q=300, window_left=70, window_right=10,
          deterministic=True, checks=("BITWISE", "NO_HANG")),
    _case("det_hd256_causal", "DET", seqlen_q=200, head_dim=256, causal=True, deterministic=True,
          checks=("BITWISE",)),
    _case("uniform_inputs_repeat", "DET", batch_size=2, seqlen_q=256, num_heads_q=4, head_dim=128,
          causal=True, special=("uniform_inputs",), checks=("BITWISE_DKDV",)),
    # ---- masks and windows
    _case("noncausal_square_128", "MASK", batch_size=2),
    _case("causal_bottom_right_sq_lt_sk", "MASK", batch_size=2, seqlen_q=64, seqlen_k=200, num_heads_q=4,
          num_heads_kv=2, causal=True),
    _case("causal_sq_gt_sk", "MASK", batch_size=2, seqlen_q=160, seqlen_k=80, causal=True,
          special=("neg_inf_rows",), checks=("ZERO_ROWS",)),
    _case("window_right_minus3", "MASK", seqlen_q=100, window_right=-3, special=("neg_inf_rows",),
          expect="MATCH_OR_INVALID", checks=("ZERO_ROWS",)),
    _case("window_left_inclusive_tiny", "MASK", seqlen_q=8, head_dim=8, window_left=1, window_right=0,
          note="finite-difference case: each row sees itself and exactly one earlier key"),
    _case("window_larger_than_sequence", "MASK", seqlen_q=90, seqlen_k=140, window_left=10**6,
          window_right=10**6),
    _case("local_keys_seen_by_nobody", "MASK", seqlen_q=40, seqlen_k=300, window_left=12, window_right=0,
          special=("prefill_out_nan",), checks=("ZERO_ROWS",)),
    _case("causal_with_right_window", "MASK", seqlen_q=100, causal=True, window_left=30, window_right=5,
          expect="MATCH_OR_INVALID",
          note="causal wins over right = 5; forward and backward must agree on it"),
    _case("cross_sq100_sk333", "MASK", batch_size=2, seqlen_q=100, seqlen_k=333),
    _case("scale_negative", "MASK", seqlen_q=70, seqlen_k=90, softmax_scale=-0.125),
    # ---- head dims
    _case("hd128_dv96", "HDIM", batch_size=2, seqlen_q=130, head_dim=128, head_dim_v=96),
    _case("hd128_dv8", "HDIM", seqlen_q=70, head_dim=128, head_dim_v=8),
    _case("hd256_noncausal_fp16", "HDIM", seqlen_q=192, seqlen_k=130, num_heads_q=4, num_heads_kv=2,
          head_dim=256, dtype="fp16"),
    _case("mla_192_128_causal", "HDIM", seqlen_q=160, num_heads_q=4, head_dim=192, head_dim_v=128,
          causal=True),
    _case("hd16_causal", "HDIM", batch_size=2, seqlen_q=160, head_dim=16, causal=True),
    _case("hd32_gqa", "HDIM", batch_size=2, seqlen_q=160, num_heads_q=6, num_heads_kv=2, head_dim=32,
          causal=True),
    _case("hd64_dv256", "HDIM", seqlen_q=129, seqlen_k=200, head_dim_v=256, expect="MATCH_OR_INVALID"),
    _case("hd96_causal", "HDIM", batch_size=2, seqlen_q=150, head_dim=96, causal=True),
    _case("hd192_192", "HDIM", seqlen_q=150, head_dim=192, causal=True),
    _case("err_hd264", "HDIM", seqlen_q=32, head_dim=264, expect="INVALID_ARGUMENT"),
    _case("err_q_k_width_differ", "HDIM", seqlen_q=32, override=Override(k_width=128),
          expect="INVALID_ARGUMENT"),
    _case("err_mixed_dtype", "HDIM", seqlen_q=32, override=Override(dout_dtype="fp16"),
          expect="INVALID_ARGUMENT"),
    # ---- strides and layouts
    _case("dO_sbhd_mqa", "STRIDE", batch_size=2, seqlen_q=32, num_heads_q=4, num_heads_kv=1, head_dim=128,
          dtype="fp16", layouts=Layouts(dout="sbhd")),
    _case("expanded_dO_s5_d8", "STRIDE", seqlen_q=5, head_dim=8, causal=True,
          special=("expanded_dO", "dO_ones"), layouts=Layouts(dout="expanded")),
    _case("dO_slice_of_cat", "STRIDE", batch_size=2, seqlen_q=64, num_heads_q=4, causal=True,
          layouts=Layouts(dout="cat_slice")),
    _case("last_dim_stride_2", "STRIDE", batch_size=2, seqlen_q=64, special=("strided_q",),
          layouts=Layouts(q="lastdim2", k="lastdim2", v="lastdim2"), expect="MATCH_OR_INVALID"),
    _case("dO_bhsd_s49_d32", "STRIDE", batch_size=2, seqlen_q=49, head_dim=32,
          layouts=Layouts(dout="bhsd", out="bhsd")),
    _case("heads_equal_seq_16", "STRIDE", seqlen_q=16, num_heads_q=16, causal=True, dlse=True,
          special=("row_scaled",), note="h == s: a swapped LSE or K/V layout still has a valid shape"),
    _case("hd256_fused_qkv_views", "STRIDE", head_dim=256, special=("strided_q",),
          layouts=Layouts(q="fused", k="fused", v="fused")),
    _case("batch1_absurd_stride", "STRIDE", seqlen_q=64, num_heads_q=1, special=("strided_q",),
          layouts=Layouts(q="absurd1", k="absurd1", v="absurd1")),
    _case("misaligned_base_pointer", "STRIDE", seqlen_q=65, num_heads_q=4, special=("strided_q",),
          layouts=Layouts(q="offset1", k="offset1", v="offset1", dout="offset1"), expect="MATCH_OR_INVALID"),
    _case("kv_broadcast_over_heads", "STRIDE", seqlen_q=65, seqlen_k=129, num_heads_q=4,
          special=("kv_same_over_heads",), layouts=Layouts(k="expanded_heads", v="expanded_heads")),
    # ---- large tensors
    _case("big_batch_16400", "BIG", batch_size=16400, seqlen_k=8, num_heads_q=8, head_dim=128, big="batch",
          note="b*h*sq*d just above 2^31: dQ accumulator offsets"),
    _case("big_kv_700x1500x16x128", "BIG", batch_size=700, seqlen_q=16, seqlen_k=1536, num_heads_q=16,
          head_dim=128, big="batch", note="K/V element count above 2^31"),
    _case("big_swa_262272_h64", "BIG", seqlen_q=262272, num_heads_q=64, num_heads_kv=8, head_dim=128,
          causal=True, window_left=128, big="swa"),
    # ---- softcap
    _case("softcap10_causal", "SOFTCAP", seqlen_q=256, head_dim=128, causal=True, softcap=10.0,
          checks=("NO_HANG",)),
    _case("softcap15_varlen", "SOFTCAP", seqlens_q=(128, 65, 0), seqlens_k=(217, 3, 9), num_heads_q=4,
          num_heads_kv=2, head_dim=128, causal=True, softcap=15.0, special=("neg_inf_rows", "zero_len"),
          checks=("ZERO_ROWS",)),
    _case("softcap50_window_gqa", "SOFTCAP", seqlen_q=150, num_heads_q=8, num_heads_kv=4, head_dim=256,
          causal=True, window_left=40, softcap=50.0),
    # ---- sink logit
    _case("sink_basic_h6", "SINK", batch_size=3, num_heads_q=6, sink="bf16"),
    _case("sink_fp16_dtype", "SINK", batch_size=2, seqlen_q=64, num_heads_q=4, sink="fp16"),
    _case("sink_dlse_varlen_empty", "SINK", seqlens_q=(5, 3, 0), seqlens_k=(2, 0, 1), causal=True,
          sink="fp32", dlse=True, special=("neg_inf_rows", "zero_len"), checks=("ZERO_ROWS",),
          note="a row without keys has LSE = sink and feeds dSink through dLSE"),
    _case("sink_large_offset", "SINK", num_heads_q=4, sink="fp32", sink_add=9.0,
          note="zero-initialised sinks hide a dropped sink; this one does not"),
    _case("sink_minus_inf_heads", "SINK", seqlen_q=64, num_heads_q=4, sink="fp32",
          special=("sink_neg_inf_half",), note="those heads must equal no sink, dSink = 0"),
    # ---- softmax_lse and its gradient
    _case("dlse_only", "LSE", batch_size=2, seqlen_q=96, dlse=True, special=("dO_zero",)),
    _case("dlse_hd256", "LSE", seqlen_q=96, head_dim=256, dlse=True, expect="MATCH_OR_INVALID"),
    _case("dlse_rows_without_keys", "LSE", seqlen_q=100, seqlen_k=40, causal=True, dlse=True,
          special=("neg_inf_rows",), checks=("ZERO_ROWS",)),
    _case("lse_natural_log_units", "LSE", q_mul=3.0, k_mul=3.0, special=("large_logits",),
          note="base-2 vs base-e confusion shows up at once"),
    _case("dlse_none_equals_zeros", "LSE", seqlen_q=64, dlse=True, dlse_mul=0.0),
    _case("err_lse_dtype", "LSE", seqlen_q=32, override=Override(softmax_lse_dtype="bf16"),
          expect="INVALID_ARGUMENT"),
    # ---- ring and context parallelism
    _case("ring_block_0_of_4", "CP", seqlen_q=64, num_heads_q=4, num_heads_kv=2, causal=True,
          ring=Ring(block=0, count=4)),
    _case("ring_noncausal_1_of_2", "CP", batch_size=2, seqlen_q=80, head_dim=128,
          ring=Ring(block=1, count=2)),
    _case("ring_negligible_block", "CP", seqlen_q=64, ring=Ring(block=0, count=2), special=("ring_skew",),
          note="global LSE far above this block's logits: P underflows to 0, stay finite"),
    _case("ring_sink_in_global_lse", "CP", seqlen_q=64, num_heads_q=4, sink="fp32",
          ring=Ring(block=0, count=2), expect="MATCH_OR_INVALID",
          note="LSE includes the sink once, globally; dSink from one block alone is not defined here"),
    _case("cp_chunk_all_padding", "CP", seqlens_q=(6, 4, 4, 6, 4, 4), seqlens_k=(6, 4, 4, 6, 4, 4),
          seqused_q=(6, 4, 0, 6, 4, 4), seqused_k=(3, 4, 0, 6, 0, 4),
          special=("poison_unused", "prefill_out_nan", "neg_inf_rows"), checks=("ZERO_ROWS",)),
    # ---- planning and the smallest grid
    _case("s3_d64_all_ones", "COMPILE", batch_size=9, seqlen_q=3, num_heads_q=6, special=("dO_ones",)),
    _case("tiny_all_options", "COMPILE", seqlens_q=(6, 9, 0, 3), seqlens_k=(7, 5, 4, 0), num_heads_q=4,
          num_heads_kv=2, head_dim=8, head_dim_v=16, window_left=3, window_right=2, softcap=3.0,
          deterministic=True, sink="fp32", dlse=True, special=("neg_inf_rows", "zero_len"),
          checks=("ZERO_ROWS",), note="finite-difference case; every option at once"),
)

# The window's left bound meets sink_token_length: the first keys of a sequence that stay visible.
SINK_TOKEN_CASES = (
    _case("sink_token_causal_window", "SINK_TOKEN", batch_size=2, seqlen_q=130, causal=True, window_left=24,
          sink_token_length=4),
    _case("sink_token_left_only_gqa", "SINK_TOKEN", seqlen_q=90, seqlen_k=150, num_heads_q=6, num_heads_kv=2,
          head_dim=32, dtype="fp16", window_left=20, sink_token_length=3,
          note="no right bound: keys ahead are seen, keys between the sink tokens and the left bound are not"),
    _case("sink_token_varlen_gqa", "SINK_TOKEN", seqlens_q=(37, 0, 91, 64), seqlens_k=(80, 5, 91, 150),
          num_heads_q=4, num_heads_kv=2, causal=True, window_left=16, sink_token_length=5,
          special=("zero_len",), checks=("ZERO_ROWS",),
          note="the sink tokens are each sequence's own, not the batch's first rows"),
    _case("sink_token_beyond_sequence", "SINK_TOKEN", seqlens_q=(9, 33, 3), seqlens_k=(9, 33, 3), causal=True,
          window_left=2, sink_token_length=64,
          note="every sequence ends inside its sink tokens: plain causal"),
    _case("sink_token_beyond_window", "SINK_TOKEN", seqlen_q=100, dtype="fp16", window_left=3, window_right=0,
          sink_token_length=17, note="the window slides inside the sink tokens before it leaves them"),
    _case("sink_token_sq_gt_sk", "SINK_TOKEN", seqlen_q=160, seqlen_k=70, causal=True, window_left=10,
          sink_token_length=6, special=("neg_inf_rows",), checks=("ZERO_ROWS",),
          note="the right bound still holds: the first 90 queries see no key, sink tokens included"),
    _case("sink_token_softcap_sink_dlse", "SINK_TOKEN", seqlen_q=96, num_heads_q=4, num_heads_kv=2,
          causal=True, window_left=30, sink_token_length=2, softcap=8.0, sink="fp32", dlse=True,
          note="sink tokens are keys, the sink logit is none: both at once"),
    _case("sink_token_det", "SINK_TOKEN", batch_size=2, seqlen_q=200, window_left=40, window_right=8,
          sink_token_length=7, deterministic=True, checks=("BITWISE",)),
    _case("sink_token_empty_window", "SINK_TOKEN", seqlen_q=70, seqlen_k=140, window_left=-5, window_right=0,
          sink_token_length=9, checks=("ZERO_ROWS",),
          note="the window itself holds no key: the sink tokens are all that is seen"),
    _case("sink_token_right_minus2", "SINK_TOKEN", seqlen_q=80, window_left=12, window_right=-2,
          sink_token_length=4, special=("neg_inf_rows",), checks=("ZERO_ROWS",),
          note="the first two queries see nothing, not even a sink token"),
    _case("sink_token_seqused_packed", "SINK_TOKEN", seqlens_q=(40, 70), seqlens_k=(90, 70),
          seqused_q=(33, 70), seqused_k=(61, 3), tail_q=7, tail_k=9, window_left=11, window_right=5,
          sink_token_length=4, special=("poison_unused", "neg_inf_rows"), checks=("ZERO_ROWS",),
          note="alignment and sink tokens count the used keys"),
    _case("sink_token_tiny", "SINK_TOKEN", seqlen_q=7, seqlen_k=9, num_heads_kv=1, head_dim=8, window_left=1,
          window_right=0, sink_token_length=2, note="finite-difference case"),
)
# fmt: on


def _head_dim_case(index: int, *, name: str, head_dim: int, head_dim_v: int) -> Case:
    # Odd lengths are no multiple of any tile, and a step of 2 keeps them odd.
    return _case(
        name,
        "HEAD_DIM",
        seqlen_q=37 + 2 * (index % 13),
        seqlen_k=53 + 2 * (3 * index % 17),
        num_heads_q=4,
        num_heads_kv=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=("bf16", "fp16")[index % 2],
        causal=True,
    )


WIDTHS = tuple(range(8, 257, 8))
HEAD_DIM_CASES = tuple(
    _head_dim_case(index, name=f"head_dim_{width}", head_dim=width, head_dim_v=width)
    for index, width in enumerate(WIDTHS)
) + tuple(
    # 264 - width is a multiple of 8 up to 256 too, and never width itself.
    _head_dim_case(index + 1, name=f"head_dim_v_{width}", head_dim=264 - width, head_dim_v=width)
    for index, width in enumerate(WIDTHS)
)

ALL_CASES = CASES + SINK_TOKEN_CASES
ANSWERED_CASES = tuple(case for case in ALL_CASES if not case.is_refused and not case.big)
REFUSED_CASES = tuple(case for case in ALL_CASES if case.is_refused)
BIG_CASES = tuple(case for case in ALL_CASES if case.big)
BY_NAME = {case.name: case for case in ALL_CASES + HEAD_DIM_CASES}

# fmt: off
RUNTIME_CASES = (
    RuntimeCase(name="rt_two_processes_cold_same_key", theme="JIT",
                steps="empty cache dir; start 8 processes at once that all ask for the same kernel (bf16 "
                      "d=128 causal GQA 4/2 s=256)",
                must="all succeed and agree; the cache ends with one valid entry; at most one process (or "
                     "each at most once) compiles; no partial file is ever loaded"),
    RuntimeCase(name="rt_cache_entry_from_other_process", theme="JIT",
                steps="process A compiles d=64 causal and d=64 non-causal and exits; process B loads both "
                      "in the opposite order from disk",
                must="B gets the right kernel for each (gradients match), no invalid-function launch error"),
    RuntimeCase(name="rt_thread_count_growth", theme="JIT",
                steps="compile 60 distinct configs in one process, read the thread count in "
                      "/proc/self/status",
                must="thread count stays bounded (does not grow with the number of compiles)"),
    RuntimeCase(name="rt_key_no_churn_device_scalars", theme="JIT",
                steps="call varlen 20 times, max_seqlen given once as int and 19 times as fresh 0-dim "
                      "tensors",
                must="at most one compile; or a clear INVALID_ARGUMENT for non-integers"),
    RuntimeCase(name="rt_arch_mismatch_artifact", theme="JIT",
                steps="rename / relabel an AOT artifact built for another architecture (e.g. sm_100a) into "
                      "the sm_90a slot, or set the arch override to it",
                must="rejected at load with a message naming both architectures, or rebuilt; no launch "
                     "failure at request time and no segfault"),
    RuntimeCase(name="rt_fork_after_cuda_init", theme="JIT",
                steps="initialise CUDA in the parent, fork a worker, ask the worker to compile only",
                must="compile-only works without touching CUDA, or a clear error; no hang"),
    RuntimeCase(name="rt_unwritable_cache_dir", theme="JIT",
                steps="cache dir read-only, or owned by another user, or on a full disk",
                must="service still answers (in-memory compile) and says so once; no crash loop"),
    RuntimeCase(name="rt_lengths_change_every_call", theme="VARLEN",
                steps="dense causal bf16 h=2 d=64 with s = 5, 300, 17, 129, 64, 1, 257 in this order",
                must="every call matches; no illegal address (shared buffers sized for an earlier call)"),
    RuntimeCase(name="rt_two_streams_overlap", theme="DET",
                steps="two requests on two streams at once, deterministic=True, different shapes",
                must="each bitwise equal to its own solo run (no shared scratch or semaphores)"),
    RuntimeCase(name="rt_compile_failure_is_contained", theme="COMPILE",
                steps="force one config's compile to fail (bad compiler flag or stub that raises)",
                must="that config answers with an error naming the config; others keep working"),
)
# fmt: on
