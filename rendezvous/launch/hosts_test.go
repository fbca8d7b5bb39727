package launch

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

func TestHostsAreReadAsOpenMPIReadsThem(t *testing.T) {
	for list, want := range map[string][]Host{
		"a:4,b:4,user@c":     {{"a", 4}, {"b", 4}, {"user@c", 1}},
		"a,b,a":              {{"a", 2}, {"b", 1}},
		"[fd00::7]:2,u@[::]": {{"fd00::7", 2}, {"u@::", 1}},
	} {
		if got, err := ParseHosts(list); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, %v", list, got, err)
		}
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
		"fd00::7":        "in brackets",
		"user@fd00::7:2": "in brackets",
	} {
		if got, err := ParseHosts(list); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, %v", list, got, err)
		}
	}
}

func TestHostfilesAreReadAsOpenMPIReadsThem(t *testing.T) {
	got, err := ReadHostfile(strings.NewReader("# two racks\na slots=4 max_slots=8\n\n" +
		"u@b slots=2 # the old one\nc user=v\na slots=1\n"))
	want := []Host{{"a", 5}, {"u@b", 2}, {"v@c", 1}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for text, want := range map[string]string{
		"# none":           "it names no host",
		"a\nb slots=x":     `line 2: "slots=x" after host b`,
		"a cores=4":        `line 1: "cores=4" after host a`,
		"a max_slots=many": `"max_slots=many" after host a`,
		"a slots=0":        "line 1: host a with 0 ranks",
	} {
		if got, err := ReadHostfile(strings.NewReader(text)); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

func TestPlatformsOfHostsAreKnown(t *testing.T) {
	for uname, want := range map[string]string{
		"Linux x86_64": "linux/amd64", "Linux aarch64": "linux/arm64",
		"Darwin arm64": "darwin/arm64", "FreeBSD amd64": "freebsd/amd64",
	} {
		system, machine, _ := strings.Cut(uname, " ")
		if got := platformOf(system, machine).String(); got != want {
			t.Errorf("%s is %s, want %s", uname, got, want)
		}
	}
}

func TestHostThatFailedFirstIsBlamed(t *testing.T) {
	failed := outcome{Text: "rank failed", Failed: true, Code: 3}
	elsewhere := outcome{Text: "rank failed because of another", Failed: true, Elsewhere: true,
		Code: 1}
	usage := outcome{Text: "usage", Failed: true, Usage: true, Code: 2}
	told := outcome{Text: "stopped by a signal", Told: true, Code: 143}
	end := func(name string, done outcome) event {
		return event{host: &remote{Host: Host{Name: name}, ranks: 1}, done: done}
	}
	lost := event{host: &remote{Host: Host{Name: "lost"}, first: 2, ranks: 2},
		lost: errors.New("no reason")}
	for _, c := range []struct {
		ends  []event
		want  string // "" for none
		code  int
		final bool
	}{
		{[]event{end("a", outcome{}), end("b", told)}, "", 0, false},
		{[]event{end("a", elsewhere), end("b", failed)}, "host b: rank failed", 3, false},
		{[]event{end("a", failed), end("b", failed)}, "host a: rank failed", 3, false},
		{[]event{end("a", told), end("b", elsewhere)}, "host b: rank failed because of another", 1,
			false},
		{[]event{end("a", elsewhere), lost}, "host lost is lost, with ranks 2 to 3: no reason", 1,
			false},
		{[]event{lost, end("b", failed)}, "host lost is lost, with ranks 2 to 3: no reason", 1,
			false},
		{[]event{end("a", usage), end("b", usage)}, "host a: usage", 2, true},
		{[]event{end("a", usage), end("b", told)}, "host a: usage", 2, false},
		{[]event{end("a", outcome{Text: "no program", Code: 1})}, "host a: no program", 1, true},
	} {
		err := hostVerdict(c.ends)
		f, _ := err.(*HostFailed)
		switch {
		case c.want == "" && err == nil:
		case f == nil || f.Error() != c.want || f.ExitCode() != c.code || f.final != c.final:
			t.Errorf("got %v, %+v, want %+v", err, f, c)
		}
	}
}
