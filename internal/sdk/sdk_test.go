package sdk

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// header stands for that of CUDA 13, with what the driver API has of everything:
// versions, more arguments than registers, floats.
const header = `
#define CUDA_VERSION 13000
#define CUDAAPI
#define CUDA_CB
#include <stddef.h>
typedef int CUresult, CUdevice, CUmem_advise;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext, *CUstream, *CUgraph, *CUgraphNode;
typedef void (CUDA_CB *CUhostFn)(void *);
#define cuCtxCreate cuCtxCreate_v4
#define cuMemAlloc cuMemAlloc_v2
#define cuMemAdvise cuMemAdvise_v2
CUresult CUDAAPI cuInit(unsigned int flags);
CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text);
CUresult CUDAAPI cuCtxCreate(CUcontext *ctx, void *params, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *p, size_t n);
CUresult CUDAAPI cuMany(int a, int b, int c, int d, int e, int f, int g, double h, float i,
	long *out);
CUresult CUDAAPI cuNewer(int);
`

// library stands for libcuda.so.1 of a machine with the driver. There is no
// device when the environment says so.
const library = `
#include <stdlib.h>
#include <stdio.h>
int cuInit(unsigned int flags)
{
	if (getenv("SAY_QUEUES"))
		printf("queues %s\n", getenv("CUDA_DEVICE_MAX_CONNECTIONS"));
	return getenv("NO_DEVICE") ? 100 : (int)flags;
}
int cuGetErrorString(int error, const char **text) { *text = "no such device"; return 0; }
int cuMemAlloc_v2(unsigned long long *p, size_t n) { *p = n + 1; return 0; }
int cuMany(int a, int b, int c, int d, int e, int f, int g, double h, float i, long *out)
{
	*out = a + 10 * b + 100 * c + 1000 * d + 10000 * e + 100000 * f + 1000000 * g;
	*out += (long)(h * 2) + (long)(i * 4);
	return 7;
}
`

const program = `
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
extern int euryale_cuda_status(const char **why);
int main(void)
{
	const char *why;
	CUdeviceptr p = 0;
	CUcontext ctx;
	long out = 0;
	printf("init %d\n", cuInit(0));
	printf("alloc %d", cuMemAlloc(&p, 41));
	printf(" %llu\n", p);
	for (int again = 0; again < 2; again++, out = 0) {
		printf("many %d", cuMany(1, 2, 3, 4, 5, 6, 7, 2e7, 4e7, &out));
		printf(" %ld\n", out);
	}
	printf("newer %d\n", cuNewer(1));
	printf("older %d\n", cuCtxCreate(&ctx, 0, 0));
	dlopen("libother.so", RTLD_NOW); /* which fails */
	printf("status %d", euryale_cuda_status(&why));
	printf(" %s\n", why ? why : "");
	return 0;
}
`

// setup builds an SDK from the header above, and the program against it.
func setup(t *testing.T) (dir, binary string) {
	t.Helper()
	for _, tool := range []string{compiler(), "ar"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	dir = t.TempDir()
	cuda := filepath.Join(dir, "toolkit", "include")
	put(t, filepath.Join(cuda, "cuda.h"), header)
	s := require.Value(build(context.Background(), filepath.Join(dir, "sdk"), cuda))(t)
	source := filepath.Join(dir, "main.c")
	put(t, source, program)
	binary = filepath.Join(dir, "main")
	cc(t, "-I", s.Include[0], "-I", s.Include[1], "-o", binary, source, "-L"+s.Lib, "-lcuda",
		"-ldl")
	return dir, binary
}

func put(t *testing.T, name, text string) {
	t.Helper()
	require.NoError(t, write(name, []byte(text)))
}

func cc(t *testing.T, args ...string) {
	t.Helper()
	out, err := exec.Command(compiler(), args...).CombinedOutput()
	require.That(t, err == nil, "%v: %s", err, out)
}

// lines runs the program with the driver in libraries.
func lines(t *testing.T, binary, libraries string, env ...string) []string {
	t.Helper()
	cmd := exec.Command(binary)
	cmd.Env = append(append(os.Environ(), "LD_LIBRARY_PATH="+libraries), env...)
	out, err := cmd.CombinedOutput()
	require.That(t, err == nil, "%v: %s", err, out)
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

func TestProgramStartsWithoutDriverAndSaysSo(t *testing.T) {
	dir, binary := setup(t)
	got := lines(t, binary, dir)
	want := []string{"init 0", "alloc 100 0", "many 100 0", "many 100 0", "newer 100", "older 100"}
	if _, err := os.Stat("/proc/driver/nvidia"); err == nil {
		t.Skip("this machine has a driver")
	}
	require.Check(t, slices.Equal(got[:len(got)-1], want), "got %q, want %q", got, want)
	if status := got[len(got)-1]; !strings.HasPrefix(status, "status 100 ") ||
		!strings.Contains(status, "libcuda.so.1") {
		t.Errorf("status is %q: it should name the library", status)
	}
}

func TestCallsReachTheDriverWithEveryArgument(t *testing.T) {
	dir, binary := setup(t)
	put(t, filepath.Join(dir, "library.c"), library)
	cc(t, "-shared", "-fPIC", "-o", filepath.Join(dir, "libcuda.so.1"),
		filepath.Join(dir, "library.c"))

	want := []string{"init 0", "alloc 0 42", "many 7 207654321", "many 7 207654321", "newer 500",
		"older 500", "status 0 "}
	if got := lines(t, binary, dir); !slices.Equal(trim(got), trim(want)) {
		t.Errorf("with a device: got %q, want %q", got, want)
	}
	got := lines(t, binary, dir, "NO_DEVICE=1")
	require.Check(t, got[0] == "init 0" && got[len(got)-1] == "status 100 no such device",
		"without a device: got %q: cuInit must succeed and the status must tell", got)
}

func TestDriverIsAskedForQueues(t *testing.T) {
	dir, binary := setup(t)
	put(t, filepath.Join(dir, "library.c"), library)
	cc(t, "-shared", "-fPIC", "-o", filepath.Join(dir, "libcuda.so.1"),
		filepath.Join(dir, "library.c"))
	if got := lines(t, binary, dir, "SAY_QUEUES=1"); got[1] != "queues 32" {
		t.Errorf("got %q, want 32 queues at the first call after cuInit", got)
	}
	if got := lines(t, binary, dir, "SAY_QUEUES=1",
		"CUDA_DEVICE_MAX_CONNECTIONS=1"); got[1] != "queues 1" {
		t.Errorf("got %q: what the user has chosen must stay", got[0])
	}
}

func trim(lines []string) []string {
	var out []string
	for _, l := range lines {
		out = append(out, strings.TrimSpace(l))
	}
	return out
}

func TestFunctionsHaveTheNamesOfTheirVersions(t *testing.T) {
	names, err := parseFunctions([]byte("typedef CUresult (*f)(int); extern CUresult " +
		"cuInit(unsigned); CUresult cuB_v2 (int); CUresult\ncuA(void); CUresult cuA(void); int " +
		"cuC(void);"))
	require.Check(t, err == nil && slices.Equal(names, []string{"cuA", "cuB_v2"}), "got %q, %v",
		names, err)
	if _, err := parseFunctions([]byte("int main(void);")); err == nil {
		t.Error("a header without functions was accepted")
	}
}

func TestHeadersAreThoseOfCUDAHome(t *testing.T) {
	dir := t.TempDir()
	put(t, filepath.Join(dir, "include", "cuda.h"), header)
	t.Setenv("CUDA_HOME", dir)
	if include, err := headers(); err != nil || include != filepath.Join(dir, "include") {
		t.Errorf("got %q, %v", include, err)
	}
	t.Setenv("CUDA_HOME", filepath.Join(dir, "nothing"))
	if _, err := headers(); err == nil || !strings.Contains(err.Error(), "CUDA_HOME") {
		t.Errorf("error is %v: it should name CUDA_HOME", err)
	}
}

func TestEnvironmentQuotesPathsWithSpaces(t *testing.T) {
	s := SDK{Include: []string{"/a b", "/c"}, Lib: "/it's here"}
	want := []string{"CGO_ENABLED=1", "CGO_CFLAGS=-g -O2 '-I/a b' -I/c",
		`CGO_LDFLAGS="-L/it's here" -lcuda -ldl`}
	got := s.Env()
	require.Check(t, slices.Equal(got, want), "got %q, want %q", got, want)
}

func TestScriptSaysTheSameToAShell(t *testing.T) {
	s := SDK{Include: []string{"/a b", "/c"}, Lib: "/it's here"}
	for _, v := range s.Env() {
		name, want, _ := strings.Cut(v, "=")
		out, err := exec.Command("sh", "-c", `eval "$1"; printenv "$2"`, "sh", s.Script(),
			name).Output()
		require.Check(t, err == nil && strings.TrimSuffix(string(out), "\n") == want,
			"%s is %q, %v; want %q", name, out, err, want)
	}
}

func TestPrepareUsesTheToolkit(t *testing.T) {
	setup(t) // or skips without a compiler
	toolkit, dir := t.TempDir(), filepath.Join(t.TempDir(), "a place")
	put(t, filepath.Join(toolkit, "include", "cuda.h"), header)
	t.Setenv("CUDA_HOME", toolkit)
	s := require.Value(Prepare(context.Background(), dir))(t)
	if want := []string{filepath.Join(dir, "include"),
		filepath.Join(toolkit, "include")}; !slices.Equal(s.Include, want) {
		t.Errorf("include directories are %q, want %q", s.Include, want)
	}
	require.Report(t, require.Err(os.Stat(filepath.Join(s.Lib, "libcuda.a"))))
	t.Setenv("CUDA_HOME", filepath.Join(toolkit, "nothing"))
	if _, err := Prepare(context.Background(), dir); err == nil ||
		!strings.Contains(err.Error(), "CUDA_HOME") {
		t.Errorf("error is %v: a toolkit that is named and not there must not be replaced", err)
	}
}

func TestCacheIsOfThisVersion(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", "/cache")
	dir, err := cacheDir()
	require.Check(t, err == nil && strings.HasPrefix(dir, "/cache/euryale/gpu-sdk-") &&
		len(filepath.Base(dir)) == len("gpu-sdk-")+12, "%q, %v", dir, err)
}

func TestPrepareWithoutADirectoryUsesTheUsersCache(t *testing.T) {
	setup(t) // or skips without a compiler
	toolkit, cache := t.TempDir(), t.TempDir()
	put(t, filepath.Join(toolkit, "include", "cuda.h"), header)
	t.Setenv("CUDA_HOME", toolkit)
	t.Setenv("XDG_CACHE_HOME", cache)
	s, err := Prepare(context.Background(), "")
	require.Check(t, err == nil && strings.HasPrefix(s.Lib, filepath.Join(cache, "euryale",
		"gpu-sdk-")), "the libraries are in %q, %v", s.Lib, err)
}
