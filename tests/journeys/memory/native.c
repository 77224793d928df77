/* A backend of Triton that takes and frees memory in the server itself as ONNX Runtime does: the
   whole file, then blocks of 96 KiB to 12 MiB with temporary ones between them, and small ones that
   stay for good. A model has `mebibytes` of its config while it is loaded, and pauses for
   `pause_ms` after each block. It computes nothing. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define KIB (size_t)1024
#define MIB (1024 * KIB)
enum { UNSUPPORTED = 5 };

typedef struct TRITONSERVER_Error TRITONSERVER_Error;
typedef struct TRITONSERVER_Message TRITONSERVER_Message;
typedef struct TRITONBACKEND_Model TRITONBACKEND_Model;
typedef struct TRITONBACKEND_ModelInstance TRITONBACKEND_ModelInstance;
typedef struct TRITONBACKEND_Request TRITONBACKEND_Request;
extern TRITONSERVER_Error* TRITONSERVER_ErrorNew(int code, const char* text);
extern TRITONSERVER_Error* TRITONSERVER_MessageSerializeToJson(
    TRITONSERVER_Message*, const char** text, size_t* size);
extern TRITONSERVER_Error* TRITONSERVER_MessageDelete(TRITONSERVER_Message*);
extern TRITONSERVER_Error* TRITONBACKEND_ModelConfig(
    TRITONBACKEND_Model*, uint32_t version, TRITONSERVER_Message**);
extern TRITONSERVER_Error* TRITONBACKEND_ModelSetState(TRITONBACKEND_Model*, void*);
extern TRITONSERVER_Error* TRITONBACKEND_ModelState(TRITONBACKEND_Model*, void**);

static const size_t SIZES[] = {96 * KIB,  1500 * KIB, 300 * KIB,  6 * MIB,
                               700 * KIB, 3 * MIB,    2500 * KIB, 12 * MIB};
enum { SIZE_COUNT = sizeof SIZES / sizeof *SIZES };

typedef struct Block {
  struct Block* next;
} Block;

void* small; /* the last of them, so that the compiler does not leave the memory out */

static void* take(size_t size)
{
  void* block = malloc(size);
  return block == NULL ? NULL : memset(block, 1, size);
}

/* Return the number that the config has as a parameter, 0 if it has none. */
static long read_parameter(TRITONBACKEND_Model* model, const char* key)
{
  TRITONSERVER_Message* message = NULL;
  const char* json = NULL;
  size_t size = 0;
  TRITONBACKEND_ModelConfig(model, 1, &message);
  TRITONSERVER_MessageSerializeToJson(message, &json, &size);
  char* text = strndup(json, size);
  const char* found = strstr(text, key);
  if (found != NULL) found = strstr(found, "\"string_value\":\"");
  long number = found == NULL ? 0 : atol(found + strlen("\"string_value\":\""));
  free(text);
  TRITONSERVER_MessageDelete(message);
  return number;
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model)
{
  size_t remaining = (size_t)read_parameter(model, "\"mebibytes\"") * MIB;
  long pause_ms = read_parameter(model, "\"pause_ms\"");
  Block* blocks = NULL;
  void* file = take(remaining);
  for (unsigned n = 0; remaining >= sizeof(Block); n++) {
    size_t size = SIZES[n % SIZE_COUNT];
    if (size > remaining) size = remaining;
    void* temporary = take(size);
    Block* block = take(size);
    block->next = blocks;
    blocks = block;
    small = take(200 + n % 300);
    free(temporary);
    remaining -= size;
    usleep(1000 * pause_ms);
  }
  free(file);
  return TRITONBACKEND_ModelSetState(model, blocks);
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model)
{
  void* state = NULL;
  TRITONBACKEND_ModelState(model, &state);
  Block* block = state;
  while (block != NULL) {
    Block* next = block->next;
    free(block);
    block = next;
  }
  return NULL;
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, uint32_t count)
{
  return TRITONSERVER_ErrorNew(UNSUPPORTED, "it computes nothing");
}
