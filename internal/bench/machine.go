package bench

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
)

// Machine describes this machine as far as a measurement depends on it:
// processor and cores.
func Machine() string {
	return fmt.Sprintf("%s, %d cores, %s/%s", processor(), Cores(), runtime.GOOS, runtime.GOARCH)
}

// Cores returns how many cores the machine has, hardware threads counted apart.
// This process may be bound to fewer, which runtime.NumCPU counts.
func Cores() int {
	text, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		return runtime.NumCPU()
	}
	return max(CountList(string(text)), runtime.NumCPU())
}

// CountList counts the numbers in a list such as "0-3,8".
func CountList(list string) int {
	n := 0
	for part := range strings.SplitSeq(strings.TrimSpace(list), ",") {
		var first, last int
		switch found, _ := fmt.Sscanf(part, "%d-%d", &first, &last); found {
		case 1:
			n++
		case 2:
			n += last - first + 1
		}
	}
	return n
}

// processor returns the name that Linux has for the first core.
func processor() string {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown processor"
	}
	for line := range strings.Lines(string(info)) {
		name, value, _ := strings.Cut(line, ":")
		if name = strings.TrimSpace(name); name == "model name" || name == "Model" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown processor"
}

// Version returns the module version that this program was built from, and the
// revision where the build knows it.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown version"
	}
	version := info.Main.Version
	if version == "" || version == "(devel)" {
		version = "devel"
	}
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision" && !strings.Contains(version, s.Value[:min(12, len(s.Value))]):
			version += " " + s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true" && !strings.HasSuffix(version, "+dirty"):
			version += "+dirty"
		}
	}
	return version
}
