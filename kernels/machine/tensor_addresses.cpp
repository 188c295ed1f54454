// Looks whether the tensors in dicts of Python still have their addresses. Python would take one cache miss after
// another for them: the weights of the step before have pushed its objects out of the caches. Here the lines that a
// look reads are fetched together first.
//
// Called with Python's global lock held. Functions of other libraries are passed in, and so are offsets in their
// objects, which the caller has found in an object of each type.
#include <cstdint>

struct Reader {
  int (*next)(void* dict, int64_t* position, void** key, void** value);  // PyDict_Next
  int32_t (*data_ptr)(void** tensor, void** address);  // aoti_torch_get_data_ptr; a tensor is a pointer; true: an error
  const void* none;
  int64_t type_offset, tensor_offset;  // in a tensor's object: of its type, and of what data_ptr takes
};

struct Tensor {
  const void* type;
  const void* address;      // of its first element
  const char* lines[3];     // its object, its implementation and its storage as they lay; only prefetched
};

struct Look {
  const Reader* reader;
  void* const* dicts;
  int64_t num_dicts;
  const Tensor* tensors;  // of all dicts, one after another, without None
  int64_t num_tensors;
};

constexpr int LINES[3] = {1, 3, 2};  // of 64 bytes, that a look reads of each

// Returns whether the dicts hold as many tensors, of these types at these addresses in this order.
extern "C" int64_t lockstep_are_there(const Look* look) {
  const Reader& reader = *look->reader;
  for (int64_t d = 0; d < look->num_dicts; d++) __builtin_prefetch(look->dicts[d]);
  for (int64_t i = 0; i < look->num_tensors; i++)
    for (int part = 0; part < 3; part++)
      for (int line = 0; line < LINES[part]; line++) __builtin_prefetch(look->tensors[i].lines[part] + 64 * line);
  int64_t i = 0;
  for (int64_t d = 0; d < look->num_dicts; d++) {
    int64_t position = 0;
    void* value;
    while (reader.next(look->dicts[d], &position, nullptr, &value)) {
      if (value == reader.none) continue;
      if (i == look->num_tensors) return 0;
      const Tensor& expected = look->tensors[i++];
      char* object = static_cast<char*>(value);
      if (*reinterpret_cast<void**>(object + reader.type_offset) != expected.type) return 0;
      void* address;
      if (reader.data_ptr(reinterpret_cast<void**>(object + reader.tensor_offset), &address)) return 0;
      if (address != expected.address) return 0;
    }
  }
  return i == look->num_tensors;
}
