// What followed the places in earlier tokens that end like a sequence, by votes: see votes.py.
#include <cstdint>
#include <cstring>

namespace {

constexpr int32_t kBreak = -1;  // between texts: no token
constexpr int kMaxPlaces = 64;

struct Places {
    int length = 0;  // tokens that are equal there
    int count = 0;
    const int32_t* first[kMaxPlaces];  // tokens behind each place
    int64_t left[kMaxPlaces];          // how many there are
};

// The largest of the ascending `lengths` that is at most `equal`; 0 if there is none.
int rounded(int equal, const int32_t* lengths, int num_lengths) {
    int found = 0;
    for (int i = 0; i < num_lengths && lengths[i] <= equal; ++i) found = lengths[i];
    return found;
}

int64_t up_to_break(const int32_t* tokens, int64_t most) {
    int64_t num = 0;
    while (num < most && tokens[num] != kBreak) ++num;
    return num;
}

// Adds the places of one text, the newest first. A longer match replaces all shorter ones.
void search(const int32_t* text, int64_t size, const int32_t* ending, int num_ending, int64_t most, int num_places,
            const int32_t* lengths, int num_lengths, Places& best) {
    const int32_t last = ending[num_ending - 1];
    const int longest = lengths[num_lengths - 1];
    for (int64_t end = size - 1; end >= 1; --end) {
        if (text[end - 1] != last) continue;
        if (best.count == num_places && best.length == longest) return;
        const int64_t limit = end < num_ending ? end : num_ending;
        int equal = 1;
        while (equal < limit && text[end - 1 - equal] == ending[num_ending - 1 - equal]) ++equal;
        const int length = rounded(equal, lengths, num_lengths);
        if (length < best.length || length == 0 || (length == best.length && best.count == num_places)) continue;
        const int64_t left = up_to_break(text + end, most < size - end ? most : size - end);
        if (left == 0) continue;
        if (length > best.length) best.length = length, best.count = 0;
        best.first[best.count] = text + end;
        best.left[best.count++] = left;
    }
}

}  // namespace

// texts: pointers to tokens; sizes: of each. tokens, num_alike, num_voters: of `most` elements each. Returns how many
// tokens were voted for; match: tokens of the ending that are equal at the places.
extern "C" int64_t vote(const int32_t* const* texts, const int64_t* sizes, int64_t num_texts, const int32_t* ending,
                        int64_t num_ending, int64_t most, int64_t num_places, const int32_t* lengths,
                        int64_t num_lengths, int32_t* tokens, int32_t* num_alike, int32_t* num_voters,
                        int32_t* match) {
    Places best;
    *match = 0;
    if (num_ending == 0 || num_places > kMaxPlaces) return 0;
    for (int64_t i = 0; i < num_texts; ++i)
        search(texts[i], sizes[i], ending, int(num_ending), most, int(num_places), lengths, int(num_lengths), best);
    *match = best.length;
    int64_t depth = 0;
    for (; depth < most; ++depth) {
        int num = 0;  // those that go on
        for (int i = 0; i < best.count; ++i)
            if (best.left[i] > depth) {
                best.first[num] = best.first[i];
                best.left[num++] = best.left[i];
            }
        best.count = num;
        if (num == 0) break;
        int most_alike = 0;
        int32_t chosen = 0;
        for (int i = 0; i < num; ++i) {
            int alike = 0;
            for (int j = 0; j < num; ++j) alike += best.first[j][depth] == best.first[i][depth];
            if (alike > most_alike) most_alike = alike, chosen = best.first[i][depth];  // of equally many the newest
        }
        tokens[depth] = chosen;
        num_alike[depth] = most_alike;
        num_voters[depth] = num;
        num = 0;
        for (int i = 0; i < best.count; ++i)
            if (best.first[i][depth] == chosen) {
                best.first[num] = best.first[i];
                best.left[num++] = best.left[i];
            }
        best.count = num;
    }
    return depth;
}
