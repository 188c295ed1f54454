// The tokens of a row that top-k, top-p and min-p keep, as reference.py defines them: tokens are ranked by logit, equal
// ones by id, and masses are integers, so that no order of addition matters.
#pragma once
#include <limits>
#include <type_traits>

#include "sampling/rows.h"

namespace sampling {

struct Limits {
  int64_t top_k;  // at least 1; 1 takes the first of the most likely tokens
  double top_p;
  float min_p;
};

struct Ranked {  // the number of the tokens that rank before some place, and their mass in units of 2^-40
  int64_t count, mass;
};

struct Cut {  // the end of the kept ranking: tokens with logit > `value`, and those with logit == `value` up to `last`
  float value;
  int64_t last;
};

// exp(z) for z <= 0, in operations of one rounding each, so that all paths compute the same bits; 0 below -87.3.
inline Floats weight(Floats z) {
  const Floats lowest = splat(-87.3f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Ints underflow = z < lowest;
  Floats y = select(underflow, lowest, z);
  Floats t = y * splat(1.44269504088896341f) + magic;
  Floats n = t - magic;
  Floats r = n * splat(-0.693359375f) + y;
  r = n * splat(2.12194440e-4f) + r;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = (p * (r * r) + r) + splat(1.0f);
  Floats power = (Floats)((((Ints)t) << 23) + (127 << 23));
  return select(underflow, splat(0.0f), p * power);
}

inline int64_t fold(const Ints& v) {
  int64_t total = 0;
  for (int i = 0; i < W; i++) total += v[i];
  return total;
}

// The filters of one row, and whether they keep its winner, the token that would be drawn without them.
template <typename T>
class Filter {
 public:
  // groups: of `find_largest`; reordered. ranked: memory that is reused.
  Filter(const Row<T>& row, const Limits& limits, int64_t winner, std::vector<float>& groups,
         std::vector<std::pair<float, int64_t>>& ranked)
      : row(row), limits(limits), groups(groups), ranked(ranked), ranks(limits.top_k < row.V || limits.top_p < 1.0),
        weighs(limits.top_p < 1.0) {
    keeps_winner = weight(splat(row.scaled_at(winner)))[0] >= limits.min_p;
    if (!ranks) return;
    float x = row.logit_at(winner);
    Ranked before = sum(weighs, [&](Floats other, int64_t i) {
      int32_t ties = (int32_t)std::clamp<int64_t>(winner - i, 0, W);
      return (other > splat(x)) | ((other == splat(x)) & (positions() < ties));
    }, &all);
    if (weighs) mass_limit = (int64_t)((double)all.mass * limits.top_p);
    keeps_winner &= !is_beyond(before);
  }

  bool keeps_winner;

  // Calls show(i, e) for LANES tokens each, where e is 0 for tokens that are not kept.
  template <typename Show>
  void show_kept(Show show) {
    Cut cut = ranks ? find_cut() : Cut{-INFINITY, -1};
    for (int64_t i = 0; i < row.V; i += LANES) {
      Lanes x = row.logits(i), z = row.scaled(x);
      int32_t ties = (int32_t)std::clamp<int64_t>(cut.last - i + 1, 0, LANES);  // lanes of i that are kept if they tie
      show(i, lanes([&](int u) {
             Ints is_kept = (x.part[u] > splat(cut.value)) |
                            ((x.part[u] == splat(cut.value)) & (positions() + u * W < ties));
             is_kept &= weight(z.part[u]) >= splat(limits.min_p);
             return select(is_kept, exp_nonpositive(z.part[u]), splat(0.0f));
           }));
    }
  }

 private:
  const Row<T>& row;
  Limits limits;
  std::vector<float>& groups;
  std::vector<std::pair<float, int64_t>>& ranked;
  bool ranks, weighs;  // whether top_k or top_p, and whether top_p excludes tokens
  int64_t mass_limit = INT64_MAX;
  Ranked all{0, 0};  // tokens with a logit above -inf

  static Ints units_of(Floats z, Ints* rest) {  // weight in units of 2^-20; the rest in units of 2^-40, rounded down
    Floats scaled = weight(z) * splat(1048576.0f);
    Ints high = __builtin_convertvector(scaled, Ints);
    *rest = __builtin_convertvector((scaled - __builtin_convertvector(high, Floats)) * splat(1048576.0f), Ints);
    return high;
  }

  bool is_beyond(const Ranked& r) const { return r.count >= limits.top_k || r.mass > mass_limit; }

  // Sums the tokens for which is_in(logits, id of the first) has set lanes; also `all` tokens above -inf, if wanted.
  template <typename IsIn>
  Ranked sum(bool with_mass, IsIn is_in, Ranked* all = nullptr) const {
    auto add = [&](auto weighing) {
      Ranked found{0, 0}, whole{0, 0};
      for (int64_t start = 0; start < row.V; start += BLOCK) {
        Ints counts[2] = {}, high[2] = {}, low[2] = {};
        for (int64_t i = start, end = std::min(start + BLOCK, row.V); i < end; i += LANES) {
          Lanes x = row.logits(i);
          for (int u = 0; u < PARTS; u++) {
            Ints mask = is_in(x.part[u], i + u * W), any = x.part[u] > splat(-INFINITY);
            counts[0] -= mask;
            counts[1] -= any;
            if constexpr (decltype(weighing)::value) {
              Ints rest, units = units_of((x.part[u] - splat(row.largest)) * splat(row.inverse), &rest);
              high[0] += units & mask;
              low[0] += rest & mask;
              high[1] += units;
              low[1] += rest;
            }
          }
        }
        add_block(found, counts[0], high[0], low[0]);
        add_block(whole, counts[1], high[1], low[1]);
      }
      if (all) *all = whole;
      return found;
    };
    return with_mass ? add(std::true_type()) : add(std::false_type());
  }
  static void add_block(Ranked& to, const Ints& counts, const Ints& high, const Ints& low) {
    to.count += fold(counts);
    to.mass += (fold(high) << 20) + fold(low);
  }

  Ranked above(float value, bool with_mass) const {
    return sum(with_mass, [&](Floats x, int64_t) { return x > splat(value); });
  }

  // The interval (low, high] of logits that holds the last kept token is halved until it has few tokens; these are
  // sorted.
  Cut find_cut() {
    float low = -INFINITY, high = row.largest;
    Ranked above_low = all, above_high{0, 0};
    if (!is_beyond(all)) return {low, -1};
    auto halve_at = [&](float middle, bool with_mass) {
      if (!(low < middle && middle < high)) return false;
      Ranked found = above(middle, with_mass);
      (is_beyond(found) ? low : high) = middle;
      (is_beyond(found) ? above_low : above_high) = found;
      return true;
    };
    if (limits.top_k <= (int64_t)groups.size()) {  // k groups have a logit that is at least this: the count decides
      auto kth = groups.begin() + (limits.top_k - 1);
      std::nth_element(groups.begin(), kth, groups.end(), std::greater<float>());
      halve_at(below(*kth), false);
    }
    int64_t few = std::clamp<int64_t>(row.V / 128, 64, 1024);
    auto is_wide = [&] { return above_low.count - above_high.count > few; };
    if (weighs && is_wide()) {  // tokens below this have less than half of the mass that is cut
      double e = 0.5 * (1.0 - limits.top_p) * (double)all.mass * 0x1p-40 / (double)row.V;
      halve_at(row.largest + (float)std::log(std::max(e, 1e-38)) * row.temperature, true);
    }
    for (int i = 0; is_wide(); i++) {
      bool halved = i < 24 && std::isfinite(high - low) && halve_at(0.5f * (low + high), weighs);
      if (!halved && !halve_at(between(low, high), weighs)) break;
    }
    return last_of(low, high, above_high);
  }

  // Returns a number below x: the next one, but no denormal number, which a processor that flushes them takes for 0.
  static float below(float x) {
    float next = std::nextafterf(x, -INFINITY);
    return std::fabs(next) < std::numeric_limits<float>::min() ? -std::numeric_limits<float>::min() : next;
  }

  // Returns a number in the middle of all floats between the two; one of them if there is none.
  static float between(float low, float high) {
    auto order = [](float x) {
      int32_t i;
      memcpy(&i, &x, 4);
      return (int64_t)(i < 0 ? (int32_t)0x80000000 - i : i);
    };
    int32_t middle = (int32_t)((order(low) + order(high)) >> 1);
    int32_t bits = middle < 0 ? (int32_t)0x80000000 - middle : middle;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }

  Cut last_of(float low, float high, Ranked so_far) {
    ranked.clear();
    for (int64_t i = 0; i < row.V; i += LANES) {
      Lanes x = row.logits(i);
      for (int u = 0; u < PARTS; u++) {
        uint32_t inside = bits((x.part[u] > splat(low)) & (x.part[u] <= splat(high)));
        for (; inside; inside &= inside - 1) {
          int lane = __builtin_ctz(inside);
          ranked.push_back({x.part[u][lane], i + u * W + lane});
        }
      }
    }
    auto is_before = [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    };
    if (!std::is_sorted(ranked.begin(), ranked.end(), is_before)) std::sort(ranked.begin(), ranked.end(), is_before);
    Cut cut{high, -1};
    for (const auto& [x, index] : ranked) {
      if (is_beyond(so_far)) break;
      cut = {x, index};
      Ints rest, first = units_of(splat(row.scaled_at(index)), &rest);
      so_far.count++;
      so_far.mass += ((int64_t)first[0] << 20) + rest[0];
    }
    return cut;
  }
};

}  // namespace sampling
