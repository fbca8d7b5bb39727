package launch

import (
	"reflect"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestHostsAreReadAsOpenMPIReadsThem(t *testing.T) {
	for list, want := range map[string][]Host{
		"a:4,b:4,user@c":     {{"a", 4}, {"b", 4}, {"user@c", 1}},
		"a,b,a":              {{"a", 2}, {"b", 1}},
		"[fd00::7]:2,u@[::]": {{"fd00::7", 2}, {"u@::", 1}},
	} {
		got, err := ParseHosts(list)
		require.Check(t, err == nil && reflect.DeepEqual(got, want), "%s: %v, %v", list, got, err)
	}
	for list, want := range map[string]string{
		"a,":             "write what ssh takes",
		"":               "write what ssh takes",
		"-oProxy=x":      "write what ssh takes",
		"a b":            "write what ssh takes",
		"@a":             "write what ssh takes",
		"a:x":            "write HOST:N",
		"a:0":            "takes 1 to 1024",
		"a:1025":         "takes 1 to 1024",
		"a:1000,a:25":    "a with 1025 ranks",
		"fd00::7":        "in brackets",
		"user@fd00::7:2": "in brackets",
	} {
		require.Fails(t, list, require.Err(ParseHosts(list)), want)
	}
}

func TestHostfilesAreReadAsOpenMPIReadsThem(t *testing.T) {
	got, err := ReadHostfile(strings.NewReader("# two racks\na slots=4 max_slots=8\n\n" +
		"u@b slots=2 # the old one\nc user=v\na slots=1\nd\tslots = 3\tmax-slots= 4#\r\n\t\r\n" +
		"[fd00::7] slots=2\r\n[fd00::7]\r\n"))
	want := []Host{{"a", 5}, {"u@b", 2}, {"v@c", 1}, {"d", 3}, {"fd00::7", 3}}
	require.Check(t, err == nil && reflect.DeepEqual(got, want), "%v, %v", got, err)
	for text, want := range map[string]string{
		"# none":               "it names no host",
		"a\nb slots=x":         `line 2: "slots=x" after host b`,
		"a cores=4":            `line 1: "cores=4" after host a`,
		"a slots":              `line 1: "slots" after host a`,
		"a slots= max_slots=4": `line 1: "slots=max_slots=4" after host a`,
		"a =":                  `line 1: "=" after host a`,
		"a user=":              `host "@a"`,
		"a max_slots=many":     `"max_slots=many" after host a`,
		"a slots=0":            "line 1: host a with 0 ranks",
		"a:2":                  `line 1: "a:2": a hostfile has the number of ranks after`,
		"b\nu@a:2 slots=3":     "write u@a slots=2",
		"[fd00::7]:4":          "write [fd00::7] slots=4",
		"fd00::7":              "in brackets",
		"a:b":                  "in brackets",
	} {
		require.Fails(t, text, require.Err(ReadHostfile(strings.NewReader(text))), want)
	}
}

func TestPlatformsOfHostsAreKnown(t *testing.T) {
	for uname, want := range map[string]string{
		"Linux x86_64": "linux/amd64", "Linux aarch64": "linux/arm64",
		"Darwin arm64": "darwin/arm64", "FreeBSD amd64": "freebsd/amd64",
	} {
		system, machine, _ := strings.Cut(uname, " ")
		require.Equal(t, uname, platformOf(system, machine).String(), want)
	}
}
