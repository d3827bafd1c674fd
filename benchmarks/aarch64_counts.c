/* A plugin of qemu's user mode: counts the guest's instructions and writes their number to the file
 * that `out=FILE` names. qemu-plugin.h is in no package, so what it needs of version 1 is declared
 * here. It was run with qemu 7.2; from 9.0 on qemu asks for version 2 at least. */
#include <stdint.h>
#include <stdio.h>

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct qemu_plugin_tb*));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, int, void*, uint64_t);
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void*), void*);

int qemu_plugin_version = 1;
static uint64_t count;

static void translated(plugin_id id, struct qemu_plugin_tb* block) {
  (void)id;
  qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &count, qemu_plugin_tb_n_insns(block));
}

static void ended(plugin_id id, void* path) {
  (void)id;
  FILE* file = fopen(path, "w");
  if (file) fprintf(file, "%llu\n", (unsigned long long)count), fclose(file);
}

int qemu_plugin_install(plugin_id id, const void* info, int argc, char** argv) {
  static char path[4096];
  (void)info;
  if (argc != 1 || sscanf(argv[0], "out=%4095s", path) != 1) return 1;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, ended, path);
  return 0;
}
