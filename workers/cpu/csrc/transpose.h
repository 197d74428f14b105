// Sixteen registers of sixteen words each as a matrix, for CPUs with AVX-512.
#pragma once

#include <immintrin.h>

namespace tandem {

// Lane j of rows[i] becomes lane i of rows[j].
inline void transpose(__m512i* rows) {
  __m512i twos[16], fours[16];
  for (int i = 0; i < 16; i += 2) {  // two rows' words side by side
    twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // fours[i + k]: word k of each quarter, of four rows
    fours[i] = _mm512_unpacklo_epi64(twos[i], twos[i + 2]);
    fours[i + 1] = _mm512_unpackhi_epi64(twos[i], twos[i + 2]);
    fours[i + 2] = _mm512_unpacklo_epi64(twos[i + 1], twos[i + 3]);
    fours[i + 3] = _mm512_unpackhi_epi64(twos[i + 1], twos[i + 3]);
  }
  for (int k = 0; k < 4; ++k) {  // then the quarters: a 4 x 4 transposition of them
    const __m512i low = _mm512_shuffle_i32x4(fours[k], fours[k + 4], 0x88);
    const __m512i high = _mm512_shuffle_i32x4(fours[k + 8], fours[k + 12], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(fours[k], fours[k + 4], 0xdd);
    const __m512i odd_high = _mm512_shuffle_i32x4(fours[k + 8], fours[k + 12], 0xdd);
    rows[k] = _mm512_shuffle_i32x4(low, high, 0x88);
    rows[k + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
    rows[k + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    rows[k + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
}

}  // namespace tandem
