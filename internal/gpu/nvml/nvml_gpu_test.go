//go:build gpu

package nvml

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// library stands for NVIDIA's: a device with a link to another GPU, one to a
// switch, one that is not active, and no more.
const library = `
#include <stdio.h>
#include <string.h>
struct pci { char legacy[16]; unsigned int domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 6 ? "Not Found" : "Unknown"; }
int nvmlSystemGetDriverVersion(char *text, unsigned int n)
{
	snprintf(text, n, "580.95.05");
	return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device)
{
	*device = (void *)1;
	return strcmp(bus, "0000:18:00.0") ? 6 : 0;
}
int nvmlDeviceGetNvLinkState(void *device, unsigned int link, unsigned int *active)
{
	*active = link != 1;
	return link < 3 ? 0 : 2;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned int link, unsigned int *type)
{
	*type = link == 2 ? 2 : 0;
	return 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned int link, struct pci *pci)
{
	pci->domain = 0, pci->bus = 0x2a, pci->device = 0;
	return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory)
{
	memory[0] = 3 << 20, memory[1] = 2 << 20, memory[2] = 1 << 20;
	return 0;
}
int nvmlDeviceGetClockInfo(void *device, int type, unsigned int *mhz)
{
	*mhz = 1200;
	return type != 1;
}
int nvmlDeviceGetViolationStatus(void *device, int policy, unsigned long long *violation)
{
	violation[0] = 9, violation[1] = policy ? 5 : 70;
	return policy > 1;
}
`

func TestLibraryTellsDriverAndLinksOffGPU(t *testing.T) {
	dir := t.TempDir()
	source, so := filepath.Join(dir, "nvml.c"), filepath.Join(dir, "libnvml.so")
	require.NoError(t, os.WriteFile(source, []byte(library), 0o600))
	if out, err := exec.Command("cc", "-shared", "-fPIC", "-o", so, source).
		CombinedOutput(); err != nil {
		t.Skipf("no compiler: %v: %s", err, out)
	}
	l := require.Value(open(so))(t)
	if driver, err := l.Driver(); err != nil || driver != "580.95.05" {
		t.Errorf("driver %q, %v", driver, err)
	}
	links, err := l.Links("0000:18:00.0")
	if want := []Link{{PCIBusID: "0000:2A:00.0"}, {Switch: true}}; err != nil ||
		!slices.Equal(links, want) {
		t.Errorf("links %+v, %v; want %+v", links, err, want)
	}
	if _, err := l.Links("0000:19:00.0"); err == nil ||
		!strings.Contains(err.Error(), "Not Found") {
		t.Errorf("error is %v", err)
	}
	state, err := l.State("0000:18:00.0")
	if want := (State{MemoryTotal: 3 << 20, MemoryUsed: 1 << 20, Clock: 1.2e9,
		Throttled: 75}); err != nil || state != want {
		t.Errorf("state %+v, %v; want %+v", state, err, want)
	}
	require.NoError(t, l.Close())
}

func TestMissingLibrarySaysWhatToDoOffGPU(t *testing.T) {
	if _, err := open("libno-such-library.so"); err == nil ||
		!strings.Contains(err.Error(), "NVIDIA_DRIVER_CAPABILITIES") {
		t.Errorf("error is %v", err)
	}
}

func TestLibraryOfThisMachine(t *testing.T) {
	l, err := Open()
	if err != nil {
		require.That(t, os.Getenv("REQUIRE_GPU") != "1", "REQUIRE_GPU=1: %v", err)
		t.Skip(err)
	}
	defer l.Close()
	if driver, err := l.Driver(); err != nil || driver == "" {
		t.Errorf("driver %q, %v", driver, err)
	}
}
