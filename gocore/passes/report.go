package passes

import (
	"encoding/json"
	"math"
	"sort"
	"strconv"
)

// appendReport writes one report as a JSON object behind what is there.
func appendReport(out []byte, r Report) []byte {
	if len(out) > 0 {
		out = append(out, ',')
	}
	out = append(out, `{"name":`...)
	out = appendValue(out, r.Name)
	keys := make([]string, 0, len(r.Values))
	for key := range r.Values {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	for _, key := range keys {
		out = append(out, ',')
		out = appendValue(out, key)
		out = append(out, ':')
		out = appendValue(out, r.Values[key])
	}
	return append(out, '}')
}

func appendValue(out []byte, value any) []byte {
	switch v := value.(type) {
	case float32:
		return appendFloat(out, float64(v))
	case float64:
		return appendFloat(out, v)
	case []any:
		out = append(out, '[')
		for i, item := range v {
			if i > 0 {
				out = append(out, ',')
			}
			out = appendValue(out, item)
		}
		return append(out, ']')
	default:
		text, err := json.Marshal(v)
		if err != nil {
			text, _ = json.Marshal(err.Error())
		}
		return append(out, text...)
	}
}

func appendFloat(out []byte, v float64) []byte {
	switch {
	case math.IsNaN(v):
		return append(out, "NaN"...)
	case math.IsInf(v, 1):
		return append(out, "Infinity"...)
	case math.IsInf(v, -1):
		return append(out, "-Infinity"...)
	default:
		return strconv.AppendFloat(out, v, 'g', -1, 64)
	}
}
