"""Scores to probabilities in registers, whichever way round a main loop holds them."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from dqkv_kernels.device.mask import is_full, sees


@cute.jit
def probabilities(
    rS: cute.Tensor,
    rP: cute.Tensor,
    lse_log2: cute.Tensor,
    place: cute.Tensor,
    mask,
    scales,
    m: Int32,
    n: Int32,
    axis_k: cutlass.Constexpr,
    softcap: cutlass.Constexpr,
):
    """S in rS becomes P, times the slope of the softcap if there is one; rP receives P itself, in 16 bits.

    lse_log2: of each register's query. place: each register's (query, key) in the tile, or (key, query): axis_k says
    which of the two is the key. m, n: the tile.
    """
    inner_scale, outer_scale, _ = scales
    first_i, first_j = m * mask.tile_m, n * mask.tile_n
    if const_expr(softcap):
        # element by element, so that two fp32 values of all elements are never alive at once
        for j in cutlass.range_constexpr(cute.size(rS)):
            # tanh(x) = 1 - 2 r with r = 1 / (exp(2 x) + 1): absolute error 2e-7, where tanh.approx has 5e-4
            r = cute.arch.rcp_approx(cute.math.exp2(rS[j] * inner_scale, fastmath=True) + 1.0)
            p = cute.math.exp2(r * (-2.0 * outer_scale) + (outer_scale - lse_log2[j]), fastmath=True)
            rP[j] = p.to(rP.element_type)
            # its slope is 1 - tanh(x) ** 2
            rS[j] = p * (r * (4.0 - 4.0 * r))
        if not is_full(mask, m, n):
            for j in cutlass.range_constexpr(cute.size(rS)):
                seen = sees(mask, first_i + place[j][1 - axis_k], first_j + place[j][axis_k])
                rP[j] = rP.element_type(cutlass.select_(seen, rP[j], rP.element_type(0.0)))
                rS[j] = Float32(cutlass.select_(seen, rS[j], Float32(0.0)))
    else:
        for j in cutlass.range_constexpr(cute.size(rS)):
            rS[j] = rS[j] * outer_scale - lse_log2[j]
        if not is_full(mask, m, n):
            for j in cutlass.range_constexpr(cute.size(rS)):
                seen = sees(mask, first_i + place[j][1 - axis_k], first_j + place[j][axis_k])
                # the exponent may be anything where nothing is seen: -inf makes P zero whatever lse_log2 is
                rS[j] = Float32(cutlass.select_(seen, rS[j], Float32(float("-inf"))))
        for j in cutlass.range_constexpr(cute.size(rS)):
            p = cute.math.exp2(rS[j], fastmath=True)
            rP[j] = p.to(rP.element_type)
            rS[j] = p
