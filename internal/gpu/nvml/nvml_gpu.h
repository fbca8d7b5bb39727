/* The few calls of NVIDIA's management library that package nvml makes, by the
 * binary interface that the library has kept since CUDA 11. */

#ifndef EURYALE_NVML_H
#define EURYALE_NVML_H

struct euryale_pci { /* nvmlPciInfo_t */
	char bus_id_legacy[16];
	unsigned int domain, bus, device, device_id, subsystem_id;
	char bus_id[32];
};

struct euryale_nvml {
	void *handle;
	int (*init)(void);
	int (*shutdown)(void);
	const char *(*error_string)(int);
	int (*driver_version)(char *, unsigned int);
	int (*by_bus_id)(const char *, void **);
	int (*link_state)(void *, unsigned int, unsigned int *);
	int (*link_remote_type)(void *, unsigned int, unsigned int *);
	int (*link_remote_pci)(void *, unsigned int, struct euryale_pci *);
	int (*memory)(void *, unsigned long long *);
	int (*clock)(void *, int, unsigned int *);
	int (*max_clock)(void *, int, unsigned int *);
	int (*violation)(void *, int, unsigned long long *);
};

/* euryale_nvml_open returns NULL, or why it failed. */
const char *euryale_nvml_open(struct euryale_nvml *n, const char *path);
void euryale_nvml_close(struct euryale_nvml *n);

/* Calls through the table, for Go. */
int euryale_nvml_init(struct euryale_nvml *n);
int euryale_nvml_shutdown(struct euryale_nvml *n);
const char *euryale_nvml_error(struct euryale_nvml *n, int code);
int euryale_nvml_driver(struct euryale_nvml *n, char *text, unsigned int size);
int euryale_nvml_find(struct euryale_nvml *n, const char *bus_id, void **device);
int euryale_nvml_link_state(struct euryale_nvml *n, void *device, unsigned int link,
	unsigned int *active);
int euryale_nvml_link_remote_type(struct euryale_nvml *n, void *device, unsigned int link,
	unsigned int *type);
int euryale_nvml_link_remote_pci(struct euryale_nvml *n, void *device, unsigned int link,
	struct euryale_pci *pci);

/* euryale_nvml_state writes bytes of memory in all and in use, MHz now and at most, and nanoseconds
 * for which the limits of power and of temperature have throttled the clock; 0 for what the
 * device or the library cannot tell. */
void euryale_nvml_state(struct euryale_nvml *n, void *device, unsigned long long state[6]);

#endif
