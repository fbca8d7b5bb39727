package repolint_test

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// make help describes every target, in a whole sentence.
func TestFoundMakeHelpCutsSentences(t *testing.T) {
	atRoot(t)
	if _, err := exec.LookPath("make"); err != nil {
		t.Skip("needs make")
	}
	help := require.Value(exec.Command("make", "--no-print-directory", "help").Output())(t)
	described := map[string]bool{}
	for line := range strings.Lines(string(help)) {
		name, text, _ := strings.Cut(strings.TrimSpace(line), " ")
		described[name] = regexp.MustCompile(`^[A-Z][^.]*(\.\S[^.]*)*\.$`).MatchString(
			strings.TrimSpace(text))
		if !described[name] {
			t.Errorf("%q has no sentence", line)
		}
	}
	for _, file := range []string{"Makefile", "gpu/gpu.mk", "internal/kernels/simd/simd.mk"} {
		text := joined(t, file)
		for _, list := range regexp.MustCompile(`(?m)^\.PHONY: (.*)$`).FindAllStringSubmatch(
			text, -1) {
			for name := range strings.FieldsSeq(list[1]) {
				if name != "always" && !described[name] { // always is no target of a person's
					t.Errorf("%s: make help does not describe %s", file, name)
				}
			}
		}
	}
}

// Tests that run on every kind of device run on GPUs, too: on the emulated ones, and as programs
// that .ci/gpu runs.
func TestTestsOfDevicesRunOnGPUs(t *testing.T) {
	atRoot(t)
	makefile, script := joined(t, "gpu/gpu.mk"), joined(t, ".ci/gpu")
	built := regexp.MustCompile(`GPU_TESTED := .*`).FindString(makefile)
	wrappers := regexp.MustCompile(`for dir in (.*);`).FindString(script)
	for _, dir := range testedOnDevices(t) {
		program := "bin/test/" + strings.ReplaceAll(dir, "/", "-") + ".test"
		for what, is := range map[string]bool{
			"GPU_TESTED": slices.Contains(strings.Fields(built), dir),
			"gpu-emulated": regexp.MustCompile(`(?m)EMULATED.* \./` + dir + `( |$)`).
				MatchString(makefile),
			".ci/gpu": slices.Contains(strings.Fields(wrappers), dir) ||
				strings.Contains(script, program),
		} {
			require.Check(t, is, "%s lacks %s", what, dir)
		}
	}
}

// joined returns a file in which no line ends in a backslash.
func joined(t *testing.T, file string) string {
	t.Helper()
	text := require.Value(os.ReadFile(file))(t)
	return regexp.MustCompile(`\\\n\s*`).ReplaceAllString(string(text), "")
}

// testedOnDevices returns the packages whose tests run on every kind of device.
func testedOnDevices(t *testing.T) (packages []string) {
	t.Helper()
	err := filepath.WalkDir(".", func(file string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(file, "_test.go") ||
			file == "internal/repolint/makefile_test.go" {
			return err
		}
		text, err := os.ReadFile(file)
		for _, kinds := range []string{"testenv.OnDevices()", "testenv.OnHosts()"} {
			if bytes.Contains(text, []byte(kinds)) {
				packages = append(packages, filepath.ToSlash(filepath.Dir(file)))
			}
		}
		return err
	})
	require.That(t, err == nil && len(packages) != 0, "%v %v", packages, err)
	slices.Sort(packages)
	return slices.Compact(packages)
}

// The emulator of GPUs is built by any clang from version 15 on; where there is none, make says so.
func TestEmulatorIsBuiltByAnyClangFrom15On(t *testing.T) {
	atRoot(t)
	program := lookMake(t)
	for _, test := range []struct{ name, version, want string }{
		{"clang++-19", "19.1.0", "clang++-19"},
		{"clang++", "15.0.7", "clang++"},
		{"clang++-17", "17.0.6", "clang++-17"},
		{"clang++", "14.0.0", "no-clang"},
		{"g++", "15.0.0", "no-clang"},
	} {
		dir := t.TempDir() // all that the shell finds
		script := "#!/bin/sh\necho " + test.version + "\n"
		require.NoError(t, os.WriteFile(filepath.Join(dir, test.name), []byte(script), 0o700))
		plan := exec.Command(program, "-n", "-B", "gpu-emulated") // also what is built
		plan.Env = []string{"PATH=" + dir}
		out, _ := plan.Output() // what else make asks for is not there
		if want := "\n" + test.want + " -std=c++17"; !strings.Contains(string(out), want) {
			t.Errorf("%s %s: make does not run %s:\n%s", test.name, test.version, test.want, out)
		}
		require.Check(t, strings.Contains(string(out), "no clang++ from version 15 on is here"),
			"make has no message for that")
	}
}

// lookMake returns the path of make.
func lookMake(t *testing.T) string {
	t.Helper()
	program, err := exec.LookPath("make")
	if err != nil {
		t.Skip("needs make, which `make test` has")
	}
	return program
}

// make vuln fails where a module calls what is vulnerable, and says so where the database of
// vulnerabilities cannot be reached.
func TestVulnSaysWhereNothingIsChecked(t *testing.T) {
	atRoot(t)
	program := lookMake(t)
	const unreached = "govulncheck: fetching vulnerabilities: dial tcp: no such host\nexit status 1"
	for _, test := range []struct {
		says, code, require string
		want                string
		fails               bool
	}{
		{"No vulnerabilities found.", "0", "", ".: No vulnerabilities found.\n", false},
		{"Vulnerability #1: GO-2026-0001", "1", "", ".: Vulnerability #1: GO-2026-0001\n", true},
		{unreached, "1", "", "https://vuln.go.dev cannot be reached: no such host\nRC", false},
		{unreached, "1", "REQUIRE_VULN=1", "nothing is checked", true},
	} {
		golang := filepath.Join(t.TempDir(), "go")
		script := "#!/bin/sh\necho '" + test.says + "'\nexit " + test.code + "\n"
		require.NoError(t, os.WriteFile(golang, []byte(script), 0o700))
		vuln := exec.Command(program, "--no-print-directory", "vuln", "GO="+golang)
		vuln.Env = append(os.Environ(), "VULN_DB=https://vuln.go.dev", test.require)
		out, err := vuln.CombinedOutput()
		require.Check(t, (err != nil) == test.fails && strings.Contains(string(out)+"RC",
			test.want), "govulncheck says %q: %v\n%s", test.says, err, out)
	}
}
