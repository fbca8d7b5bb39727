package repolint_test

import (
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

var (
	// constant is a number with more digits than anybody invents: 9 of a decimal, or 16 of a
	// hexadecimal one.
	constant = regexp.MustCompile(`\b\d\.\d{8,}|\b0\.0*[1-9]\d{8,}|\b0x[0-9a-fA-F]{16}\b`)
	// philox is the one table whose numbers are shorter.
	philox = regexp.MustCompile(`\b0xD2511F53\b`)
	origin = regexp.MustCompile(`// Origin: ([\w ]+)`)
	// beginning is the first line of a declaration, or of the comment before it.
	beginning = regexp.MustCompile(
		`(?m)^(//|func |var |const |type |template|DEVICE |extern |static )`)
	heading = regexp.MustCompile(`(?m)^== (.*) ==$`)
)

// declarations cuts a source where a declaration begins, with the comment before it.
func declarations(source string) (parts []string) {
	from, comment := 0, false
	for _, at := range beginning.FindAllStringIndex(source, -1) {
		is := source[at[0]:at[1]] == "//"
		if !comment {
			parts = append(parts, source[from:at[0]])
			from = at[0]
		}
		comment = is || strings.HasPrefix(source[at[0]:at[1]], "template")
	}
	return append(parts, source[from:])
}

// A declaration with three or more constants that nobody invents says where they are from, and
// NOTICE has whom it names: their licences ask for that. Whatever NOTICE names is there.
func TestTablesOfConstantsNameTheirOrigin(t *testing.T) {
	atRoot(t)
	notice := require.Value(os.ReadFile("NOTICE"))(t)
	named, headings := map[string]bool{}, []string{"own"}
	for _, found := range heading.FindAllSubmatch(notice, -1) {
		headings = append(headings, string(found[1]))
	}
	tables := 0
	for name, source := range texts(t) {
		kind := path.Ext(name)
		if !slices.Contains([]string{".go", ".cu", ".cuh", ".c", ".cpp", ".h"}, kind) ||
			strings.HasSuffix(name, "_test.go") ||
			strings.Contains("\n"+source, "\n// Code generated ") {
			continue
		}
		for _, part := range declarations(source) {
			by := origin.FindStringSubmatch(part)
			if by != nil {
				who := strings.TrimSpace(by[1])
				named[who] = true
				require.Check(t, slices.Contains(headings, who), "%s: NOTICE does not name %q",
					name, who)
			}
			count := len(constant.FindAllString(part, -1)) + 3*len(philox.FindAllString(part, -1))
			if count < 3 {
				continue
			}
			tables++
			require.Check(t, by != nil, "%s: say the origin of these constants (// Origin: NAME, "+
				"with NAME in NOTICE, or own):\n%.300s", name, part)
		}
	}
	require.Check(t, tables >= 14, "only %d tables were found", tables)
	for _, who := range []string{"FreeBSD msun", "Cephes", "Norbert Juffa", "NVIDIA libdevice",
		"wyhash", "Philox", "MurmurHash3"} {
		require.Check(t, named[who], "NOTICE names %s, and no table does", who)
	}
}

var (
	// weak are licences that ask for no more than their text, and strong ones are others.
	weak = regexp.MustCompile(`(?i)MIT License|Permission is hereby granted, free of charge|` +
		`Redistribution and use in source and binary forms|Apache License|The Unlicense`)
	strong = regexp.MustCompile(`(?i)Mozilla Public License|SIL Open Font License|FreeType|` +
		`Creative Commons|GNU (Lesser |Affero )?General Public License`)
)

// Modules that are linked into a program, and whose licence asks for more than its text, are in
// NOTICE: Mozilla's, FreeType's, Creative Commons' and fonts'.
func TestNoticeHasModulesWhoseLicencesAskForMore(t *testing.T) {
	atRoot(t)
	notice := string(require.Value(os.ReadFile("NOTICE"))(t))
	list := require.Value(exec.Command("go", "list", "-deps", "-f",
		"{{with .Module}}{{.Path}} {{.Dir}}{{end}}", "./cmd/euryale", "./examples/...").Output())(t)
	seen := map[string]bool{}
	for line := range strings.Lines(string(list)) {
		module, dir, _ := strings.Cut(strings.TrimSpace(line), " ")
		if seen[module] || dir == "" {
			continue
		}
		seen[module] = true
		for _, file := range require.Value(os.ReadDir(dir))(t) {
			name := strings.ToUpper(file.Name())
			if file.IsDir() || !strings.HasPrefix(name, "LICEN") &&
				!strings.HasPrefix(name, "COPYING") {
				continue
			}
			text := require.Value(os.ReadFile(path.Join(dir, file.Name())))(t)
			text = text[:min(len(text), 1<<11)] // behind it, some name licences of their parts
			asks := strong.Match(text) || !weak.Match(text)
			require.Check(t, !asks || strings.Contains(notice, "== "+module+" =="),
				"NOTICE does not name %s, whose %s asks for more than most", module, file.Name())
		}
	}
	require.Check(t, len(seen) >= 40, "only %d modules were looked at", len(seen))
}
