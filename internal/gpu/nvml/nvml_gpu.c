//go:build gpu

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>
#include "nvml_gpu.h"

const char *euryale_nvml_open(struct euryale_nvml *n, const char *path)
{
	struct {
		void **entry;
		const char *name;
	} all[] = {
		{(void **)&n->init, "nvmlInit_v2"},
		{(void **)&n->shutdown, "nvmlShutdown"},
		{(void **)&n->error_string, "nvmlErrorString"},
		{(void **)&n->driver_version, "nvmlSystemGetDriverVersion"},
		{(void **)&n->by_bus_id, "nvmlDeviceGetHandleByPciBusId_v2"},
		{(void **)&n->link_state, "nvmlDeviceGetNvLinkState"},
		{(void **)&n->link_remote_pci, "nvmlDeviceGetNvLinkRemotePciInfo_v2"},
	};

	n->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!n->handle)
		return dlerror();
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		*all[i].entry = dlsym(n->handle, all[i].name);
		if (!*all[i].entry)
			return dlerror();
	}
	/* Since driver 460: without it, a link is told by its address alone. */
	*(void **)&n->link_remote_type = dlsym(n->handle, "nvmlDeviceGetNvLinkRemoteDeviceType");
	*(void **)&n->memory = dlsym(n->handle, "nvmlDeviceGetMemoryInfo");
	*(void **)&n->clock = dlsym(n->handle, "nvmlDeviceGetClockInfo");
	*(void **)&n->max_clock = dlsym(n->handle, "nvmlDeviceGetMaxClockInfo");
	*(void **)&n->violation = dlsym(n->handle, "nvmlDeviceGetViolationStatus");
	return NULL;
}

void euryale_nvml_close(struct euryale_nvml *n)
{
	if (n->handle)
		dlclose(n->handle);
}

int euryale_nvml_init(struct euryale_nvml *n)
{
	return n->init();
}

int euryale_nvml_shutdown(struct euryale_nvml *n)
{
	return n->shutdown();
}

const char *euryale_nvml_error(struct euryale_nvml *n, int code)
{
	return n->error_string(code);
}

int euryale_nvml_driver(struct euryale_nvml *n, char *text, unsigned int size)
{
	return n->driver_version(text, size);
}

int euryale_nvml_find(struct euryale_nvml *n, const char *bus_id, void **device)
{
	return n->by_bus_id(bus_id, device);
}

int euryale_nvml_link_state(struct euryale_nvml *n, void *device, unsigned int link,
	unsigned int *active) {
	return n->link_state(device, link, active);
}

int euryale_nvml_link_remote_type(struct euryale_nvml *n, void *device, unsigned int link,
	unsigned int *type) {
	enum { not_supported = 3 };

	return n->link_remote_type ? n->link_remote_type(device, link, type) : not_supported;
}

int euryale_nvml_link_remote_pci(struct euryale_nvml *n, void *device, unsigned int link,
	struct euryale_pci *pci) {
	return n->link_remote_pci(device, link, pci);
}

void euryale_nvml_state(struct euryale_nvml *n, void *device, unsigned long long state[6])
{
	enum { sm = 1, power = 0, thermal = 1 };
	unsigned long long memory[3] = {0};    /* nvmlMemory_t: total, free, used */
	unsigned long long violation[2] = {0}; /* nvmlViolationTime_t: since, nanoseconds */
	unsigned int clock = 0;

	memset(state, 0, 6 * sizeof *state);
	if (n->memory && !n->memory(device, memory))
		state[0] = memory[0], state[1] = memory[2];
	if (n->clock && !n->clock(device, sm, &clock))
		state[2] = clock;
	if (n->max_clock && !n->max_clock(device, sm, &clock))
		state[3] = clock;
	if (n->violation && !n->violation(device, power, violation))
		state[4] = violation[1];
	if (n->violation && !n->violation(device, thermal, violation))
		state[5] = violation[1];
}
