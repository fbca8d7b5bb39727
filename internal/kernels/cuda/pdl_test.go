package cuda

import (
	"errors"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// On every path, a kernel launched with PDL waits for the kernels before it ahead of its first
// access to memory. On Hopper, all kernels take part.
func TestKernelsWithPDLWaitFirst(t *testing.T) {
	texts := require.Value(textsWith("", hopper))(t)
	for family, text := range texts {
		for name, body := range bodies(text) {
			first, rest, found := strings.Cut(body, wait)
			for _, access := range []string{
				"ld.global", "st.global", "ld.volatile", "ld.relaxed", "ld.acquire", "st.relaxed",
				"st.release", "ld.shared", "st.shared",
				"atom", "red.", "cp.async", "call", "bra", "ret;", "griddepcontrol",
			} {
				if family == FewRowProducts && (access == "bra" || access == "griddepcontrol") {
					continue // it asks for memory, and reads none
				}
				require.Check(t, !strings.Contains(first, access),
					"%s of %s has %s before it waits", name, family, access)
			}
			require.Check(t, found && !strings.Contains(rest, wait), "%s of %s does not wait once",
				name, family)
		}
	}
}

func TestTextsGetPDL(t *testing.T) {
	const head, waits = "//\n.version 7.8\n.target sm_90\n", "\tgriddepcontrol.wait;\n"
	for _, test := range []struct{ text, want string }{
		{"//\n.version 7.0\n.target sm_80\n.visible .entry a_b8(\n)\n.maxntid 1, 1, 1\n{\n.reg " +
			".u32 r;\n{\n}\n}\n", head + ".visible .entry a_b8(\n)\n.maxntid 1, 1, 1\n{\n" + waits +
			".reg .u32 r;\n{\n}\n}\n"},
		{"//\n.version 9.0\n.target sm_86\n", "//\n.version 9.0\n.target sm_90\n"},
		{"//\n.version 10.1\n.target sm_80, debug\n", "//\n.version 10.1\n.target sm_90, debug\n"},
		{"//\n.version 7.8\n.target sm_80\n.visible .entry small_b8(\n)\n{\n}\n.visible .entry " +
			"a_b8(\n)\n{\n}\n", head + ".visible .entry small_b8(\n)\n{\n\tgriddepcontrol." +
			"launch_dependents;\n" + waits + "}\n.visible .entry a_b8(\n)\n{\n" + waits + "}\n"},
		// Functions are left alone, and braces may stand anywhere.
		{head + ".func f()\n{\n}\n", head + ".func f()\n{\n}\n"},
		{"//\n.version 7.8\n.target sm_80\n.visible .entry a_b8(\n){\n.reg .u32 " +
			"r;\n{\n}\n}\n.func f()\n{\n}\n", head + ".visible .entry a_b8(\n){\n" + waits +
			".reg .u32 r;\n{\n}\n}\n.func f()\n{\n}\n"},
		{"//\n.version 7.8\n.target sm_80\n.visible .entry a_b8(\n)\n{ // begins\n{\n}\n}\n",
			head + ".visible .entry a_b8(\n)\n{ // begins\n" + waits + "{\n}\n}\n"},
	} {
		got := withPDL(test.text, "small_b8")
		require.Check(t, got == test.want, "%q became %q, want %q", test.text, got, test.want)
	}
	for _, target := range []string{"sm_90", "sm_90a", "sm_100", "nothing"} {
		if text := "//\n.version 8.0\n.target " + target +
			"\n.visible .entry a_b8(\n)\n{\n}\n"; withPDL(text) != text {
			t.Errorf("a text for %s became %q", target, withPDL(text))
		}
	}
}

// All kernels take part in PDL; which of them wait for peers or release the next one differs.
func TestTraitsAreThoseOfTheKernels(t *testing.T) {
	texts := require.Value(textsWith("", hopper))(t)
	peers := map[string]bool{"allreduce": true, "ll128": true, "mesh": true}
	releasing := map[string]bool{"ll": true, "ll128": true, "ll128scatter": true,
		"ll128alltoall": true}
	for family, text := range texts {
		for name, body := range bodies(text) {
			e := require.Value(parseEntry(name))(t)
			its := traitsOf(body)
			require.Check(t, its == (traits{pdl: true, releases: its.releases, peers: peers[family],
				together: family == Recurrences}) && (!peers[family] || its.releases ==
				releasing[e.Verb]), "%s of %s: %+v", name, family, its)
		}
	}
}

// Behind a kernel that waits for peers and releases the next one, no large one uses PDL.
func TestSuccession(t *testing.T) {
	failed := errors.New("failed")
	copies, ll, twoShot := traits{pdl: true}, traits{pdl: true, releases: true, peers: true},
		traits{pdl: true, peers: true}
	sample, old := traits{pdl: true, releases: true}, traits{}
	type launch struct {
		its traits
		err error
		pdl bool
	}
	for name, launches := range map[string][]launch{
		"copies":                        {{copies, nil, true}, {copies, nil, true}},
		"a device before Hopper":        {{old, nil, false}, {old, nil, false}},
		"kernels that release the next": {{sample, nil, true}, {copies, nil, true}},
		"peers": {{ll, nil, true}, {ll, nil, true},
			{twoShot, nil, true}, {ll, nil, true}},
		"behind peers": {{ll, nil, true}, {copies, nil, false},
			{copies, nil, true}},
		"behind peers that release nothing": {{twoShot, nil, true}, {copies, nil, true}},
		"a failure behind peers": {{ll, nil, true}, {copies, failed, false},
			{copies, nil, false}, {copies, nil, true}},
		"peers that have failed": {{ll, failed, true}, {copies, nil, false}},
	} {
		var s succession
		for i, l := range launches {
			got := s.overlaps(l.its)
			require.Check(t, got == l.pdl, "%s: launch %d uses PDL: %v", name, i, got)
			s.launched(l.its, l.err)
		}
		s.forgetLast()
		require.Check(t, !s.overlaps(copies) && s.overlaps(ll), "%s: uses PDL behind unknown work",
			name)
	}
}
