package cuda

import (
	"errors"
	"strings"
	"testing"
)

// A kernel that may begin early must not touch memory before those before it have
// ended, on any path; and all may, on Hopper.
func TestKernelsThatBeginEarlyWaitFirst(t *testing.T) {
	texts, err := PTX(Hopper)
	if err != nil {
		t.Fatal(err)
	}
	for family, text := range texts {
		for name, body := range bodies(text) {
			first, rest, found := strings.Cut(body, wait)
			for _, access := range []string{
				"ld.global", "st.global", "ld.volatile", "ld.relaxed", "ld.acquire", "st.relaxed", "st.release", "ld.shared", "st.shared",
				"atom", "red.", "cp.async", "call", "bra", "ret;", "griddepcontrol",
			} {
				if strings.Contains(first, access) {
					t.Errorf("%s of %s has %s before it waits", name, family, access)
				}
			}
			if !found || strings.Contains(rest, wait) {
				t.Errorf("%s of %s does not wait once", name, family)
			}
		}
	}
}

func TestTextsAreMadeToBeginEarly(t *testing.T) {
	const head, waits = "//\n.version 7.8\n.target sm_90\n", "\tgriddepcontrol.wait;\n"
	for _, test := range []struct{ text, want string }{
		{"//\n.version 7.0\n.target sm_80\n.visible .entry a_b8(\n)\n.maxntid 1, 1, 1\n{\n.reg .u32 r;\n{\n}\n}\n", head + ".visible .entry a_b8(\n)\n.maxntid 1, 1, 1\n{\n" + waits + ".reg .u32 r;\n{\n}\n}\n"},
		{"//\n.version 9.0\n.target sm_86\n", "//\n.version 9.0\n.target sm_90\n"},
		{"//\n.version 10.1\n.target sm_80, debug\n", "//\n.version 10.1\n.target sm_90, debug\n"},
		// Functions are left alone, and braces may stand anywhere.
		{head + ".func f()\n{\n}\n", head + ".func f()\n{\n}\n"},
		{"//\n.version 7.8\n.target sm_80\n.visible .entry a_b8(\n){\n.reg .u32 r;\n{\n}\n}\n.func f()\n{\n}\n", head + ".visible .entry a_b8(\n){\n" + waits + ".reg .u32 r;\n{\n}\n}\n.func f()\n{\n}\n"},
		{"//\n.version 7.8\n.target sm_80\n.visible .entry a_b8(\n)\n{ // begins\n{\n}\n}\n", head + ".visible .entry a_b8(\n)\n{ // begins\n" + waits + "{\n}\n}\n"},
	} {
		if got := early(test.text); got != test.want {
			t.Errorf("%q became %q, want %q", test.text, got, test.want)
		}
	}
	for _, target := range []string{"sm_90", "sm_90a", "sm_100", "nothing"} {
		if text := "//\n.version 8.0\n.target " + target + "\n.visible .entry a_b8(\n)\n{\n}\n"; early(text) != text {
			t.Errorf("a text for %s became %q", target, early(text))
		}
	}
}

// What the kernels of a family are for launches, where it is not that they may begin early.
func TestTraitsAreThoseOfTheKernels(t *testing.T) {
	texts, err := PTX(Hopper)
	if err != nil {
		t.Fatal(err)
	}
	peers := map[string]bool{"allreduce": true, "linedtwo": true, "mesh": true}
	admitting := map[string]bool{"flagged": true, "lined": true}
	for family, text := range texts {
		for name, body := range bodies(text) {
			e, err := parseEntry(name)
			if err != nil {
				t.Fatal(err)
			}
			its := traitsOf(body)
			if its != (traits{early: true, admits: its.admits, peers: peers[family]}) || peers[family] && its.admits != admitting[e.Verb] {
				t.Errorf("%s of %s: %+v", name, family, its)
			}
		}
	}
}

// Behind a kernel that waits for peers and lets the next one in, no large one begins early.
func TestSuccession(t *testing.T) {
	failed := errors.New("failed")
	copies, flagged, twoShot := traits{early: true}, traits{early: true, admits: true, peers: true}, traits{early: true, peers: true}
	sample, old := traits{early: true, admits: true}, traits{}
	type launch struct {
		its   traits
		err   error
		early bool
	}
	for name, launches := range map[string][]launch{
		"copies":                           {{copies, nil, true}, {copies, nil, true}},
		"a device before Hopper":           {{old, nil, false}, {old, nil, false}},
		"kernels that let the next one in": {{sample, nil, true}, {copies, nil, true}},
		"peers":                            {{flagged, nil, true}, {flagged, nil, true}, {twoShot, nil, true}, {flagged, nil, true}},
		"behind peers":                     {{flagged, nil, true}, {copies, nil, false}, {copies, nil, true}},
		"behind peers that admit nobody":   {{twoShot, nil, true}, {copies, nil, true}},
		"a failure behind peers":           {{flagged, nil, true}, {copies, failed, false}, {copies, nil, false}, {copies, nil, true}},
		"peers that have failed":           {{flagged, failed, true}, {copies, nil, false}},
	} {
		var s succession
		for i, l := range launches {
			if got := s.early(l.its); got != l.early {
				t.Errorf("%s: launch %d begins early: %v", name, i, got)
			}
			s.launched(l.its, l.err)
		}
		s.forget()
		if s.early(copies) || !s.early(flagged) {
			t.Errorf("%s: begins early behind what is not known", name)
		}
	}
}
