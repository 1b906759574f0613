/* Reading .eh_frame (LSB 5.0 "Exception Frames"; DWARF 5, 6.4). See cfi.h. The same forms as src/unwind/rule.rs knows.
 *
 * The tables are the program's own, and mapped for its exceptions. They are read within the segment that holds them; anything unexpected ends
 * in an unsupported rule. */
#include "cfi.h"

/* DWARF numbers of the frame pointer, the stack pointer and the return address. */
#ifdef __x86_64__
enum { BP = 6, SP = 7, RA = 16 };
#else
enum { BP = 29, SP = 31, RA = 30 };
#endif

/* DW_CFA_remember_state within another. */
#define REMEMBERED_MAX 8
/* Instructions of one function. The longest seen has some thousand. */
#define INSTRUCTIONS_MAX 100000u
/* Operations of an expression of a known form. */
#define OPERATIONS_MAX 9

/* A part of memory that is read from its beginning. */
struct bytes {
	const uint8_t *at, *end;
	bool bad;
};

static uint64_t take(struct bytes *from, unsigned count)
{
	uint64_t value = 0;

	if (from->bad || (size_t)(from->end - from->at) < count) {
		from->bad = true;
		return 0;
	}
	for (unsigned i = 0; i < count; i++)
		value |= (uint64_t)from->at[i] << (8 * i);
	from->at += count;
	return value;
}

static uint64_t take_unsigned(struct bytes *from)
{
	uint64_t value = 0;

	for (unsigned shift = 0; shift < 64; shift += 7) {
		uint64_t byte = take(from, 1);

		value |= (byte & 0x7f) << shift;
		if (!(byte & 0x80))
			return value;
	}
	from->bad = true;
	return 0;
}

static int64_t take_signed(struct bytes *from)
{
	uint64_t value = 0;

	for (unsigned shift = 0; shift < 64; shift += 7) {
		uint64_t byte = take(from, 1);

		value |= (byte & 0x7f) << shift;
		if (byte & 0x80)
			continue;
		if ((byte & 0x40) && shift + 7 < 64)
			value |= ~0ull << (shift + 7);
		return (int64_t)value;
	}
	from->bad = true;
	return 0;
}

/* A pointer with an encoding DW_EH_PE_*. Only its size is of interest if it is an indirect one. */
static uint64_t take_pointer(struct bytes *from, uint8_t encoding, const uint8_t *data)
{
	uintptr_t place = (uintptr_t)from->at;
	uint64_t value;

	switch (encoding & 0x0f) {
	case 0x00: /* absptr */
	case 0x04: /* udata8 */
	case 0x0c: /* sdata8 */
		value = take(from, 8);
		break;
	case 0x01:
		value = take_unsigned(from);
		break;
	case 0x02:
		value = take(from, 2);
		break;
	case 0x03:
		value = take(from, 4);
		break;
	case 0x09:
		value = (uint64_t)take_signed(from);
		break;
	case 0x0a:
		value = (uint64_t)(int64_t)(int16_t)take(from, 2);
		break;
	case 0x0b:
		value = (uint64_t)(int64_t)(int32_t)take(from, 4);
		break;
	default:
		from->bad = true;
		return 0;
	}
	switch (encoding & 0x70) {
	case 0x00:
		return value;
	case 0x10:
		return value + place;
	case 0x30:
		return value + (uintptr_t)data;
	default:
		from->bad = true;
		return 0;
	}
}

/* Where a register of the caller is. */
struct place {
	enum { PLACE_UNSET, PLACE_UNDEFINED, PLACE_SAME, PLACE_AT_CFA, PLACE_REGISTER, PLACE_EXPRESSION, PLACE_OTHER } kind;
	int64_t value;
	struct bytes expression;
};

/* A row of the table. */
struct row {
	bool by_expression;
	uint64_t cfa_register;
	int64_t cfa_offset;
	struct bytes cfa_expression;
	struct place bp, ra;
};

/* A function's entry, with what its common entry says. */
struct entry {
	uint64_t begin, length;
	uint64_t code_factor;
	int64_t data_factor;
	bool is_signal;
	/* Each function has data of its own before its instructions. */
	bool has_data;
	struct bytes common, own;
};

static bool is_register(uint64_t number, int which)
{
	return number == (uint64_t)which;
}

static struct place *place_of(struct row *row, uint64_t number)
{
	return is_register(number, BP) ? &row->bp : is_register(number, RA) ? &row->ra : NULL;
}

static void set(struct row *row, uint64_t number, struct place place)
{
	struct place *of = place_of(row, number);

	if (of != NULL)
		*of = place;
}

static struct bytes take_block(struct bytes *from)
{
	uint64_t length = take_unsigned(from);
	struct bytes block = { .at = from->at };

	if (from->bad || (uint64_t)(from->end - from->at) < length) {
		from->bad = true;
		return (struct bytes){ .bad = true };
	}
	from->at += length;
	block.end = from->at;
	return block;
}

/* Runs instructions until they pass `pc`. Returns false if they cannot be followed. */
static bool run(struct bytes code, const struct entry *entry, uint64_t pc, struct row *row, const struct row *initial)
{
	struct row remembered[REMEMBERED_MAX];
	uint32_t depth = 0;
	uint64_t at = entry->begin;

	for (uint32_t count = 0; code.at < code.end && count < INSTRUCTIONS_MAX; count++) {
		uint8_t byte = (uint8_t)take(&code, 1), low = byte & 0x3f;
		uint64_t number, step = 0;

		switch (byte & 0xc0) {
		case 0x40: /* advance_loc */
			step = low;
			break;
		case 0x80: /* offset */
			set(row, low, (struct place){ .kind = PLACE_AT_CFA, .value = (int64_t)take_unsigned(&code) * entry->data_factor });
			break;
		case 0xc0: /* restore */
			if (place_of(row, low) != NULL)
				*place_of(row, low) = is_register(low, BP) ? initial->bp : initial->ra;
			break;
		default:
			switch (byte) {
			case 0x00: /* nop */
				break;
			case 0x01: /* set_loc: no compiler writes it */
				return false;
			case 0x02: /* advance_loc1, 2, 4 */
				step = take(&code, 1);
				break;
			case 0x03:
				step = take(&code, 2);
				break;
			case 0x04:
				step = take(&code, 4);
				break;
			case 0x05: /* offset_extended */
				number = take_unsigned(&code);
				set(row, number, (struct place){ .kind = PLACE_AT_CFA,
								 .value = (int64_t)take_unsigned(&code) * entry->data_factor });
				break;
			case 0x06: /* restore_extended */
				number = take_unsigned(&code);
				if (place_of(row, number) != NULL)
					*place_of(row, number) = is_register(number, BP) ? initial->bp : initial->ra;
				break;
			case 0x07: /* undefined */
				set(row, take_unsigned(&code), (struct place){ .kind = PLACE_UNDEFINED });
				break;
			case 0x08: /* same_value */
				set(row, take_unsigned(&code), (struct place){ .kind = PLACE_SAME });
				break;
			case 0x09: /* register */
				number = take_unsigned(&code);
				set(row, number, (struct place){ .kind = PLACE_REGISTER, .value = (int64_t)take_unsigned(&code) });
				break;
			case 0x0a: /* remember_state */
				if (depth == REMEMBERED_MAX)
					return false;
				remembered[depth++] = *row;
				break;
			case 0x0b: /* restore_state */
				if (depth == 0)
					return false;
				*row = remembered[--depth];
				break;
			case 0x0c: /* def_cfa */
				row->by_expression = false;
				row->cfa_register = take_unsigned(&code);
				row->cfa_offset = (int64_t)take_unsigned(&code);
				break;
			case 0x0d: /* def_cfa_register */
				row->by_expression = false;
				row->cfa_register = take_unsigned(&code);
				break;
			case 0x0e: /* def_cfa_offset */
				row->cfa_offset = (int64_t)take_unsigned(&code);
				break;
			case 0x0f: /* def_cfa_expression */
				row->by_expression = true;
				row->cfa_expression = take_block(&code);
				break;
			case 0x10: /* expression */
				number = take_unsigned(&code);
				set(row, number, (struct place){ .kind = PLACE_EXPRESSION, .expression = take_block(&code) });
				break;
			case 0x11: /* offset_extended_sf */
				number = take_unsigned(&code);
				set(row, number,
				    (struct place){ .kind = PLACE_AT_CFA, .value = take_signed(&code) * entry->data_factor });
				break;
			case 0x12: /* def_cfa_sf */
				row->by_expression = false;
				row->cfa_register = take_unsigned(&code);
				row->cfa_offset = take_signed(&code) * entry->data_factor;
				break;
			case 0x13: /* def_cfa_offset_sf */
				row->cfa_offset = take_signed(&code) * entry->data_factor;
				break;
			case 0x14: /* val_offset */
				number = take_unsigned(&code);
				take_unsigned(&code);
				set(row, number, (struct place){ .kind = PLACE_OTHER });
				break;
			case 0x15: /* val_offset_sf */
				number = take_unsigned(&code);
				take_signed(&code);
				set(row, number, (struct place){ .kind = PLACE_OTHER });
				break;
			case 0x16: /* val_expression */
				number = take_unsigned(&code);
				take_block(&code);
				set(row, number, (struct place){ .kind = PLACE_OTHER });
				break;
			case 0x2d: /* arm64: the return address is signed from here on; its signature is always removed */
				break;
			case 0x2e: /* GNU_args_size */
				take_unsigned(&code);
				break;
			default:
				return false;
			}
		}
		if (code.bad)
			return false;
		if (step != 0) {
			at += step * entry->code_factor;
			if (at > pc)
				return true;
		}
	}
	return code.at >= code.end;
}

/* Reads the entry of a function. */
static bool read_entry(const struct module *module, const uint8_t *place, struct entry *entry)
{
	struct bytes own = { .at = place, .end = module->high };
	struct bytes common = { .end = module->high };
	uint8_t encoding = 0;
	const uint8_t *augmentation;
	uint64_t length = take(&own, 4), back;

	/* 0 ends the table; 0xffffffff begins a form that no compiler writes. */
	if (own.bad || length == 0 || length == 0xffffffff || (uint64_t)(own.end - own.at) < length)
		return false;
	own.end = own.at + length;
	back = take(&own, 4);
	common.at = own.at - 4 - back;
	if (back == 0 || common.at < module->low || common.at >= own.at)
		return false;
	length = take(&common, 4);
	if (common.bad || length == 0xffffffff || (uint64_t)(common.end - common.at) < length)
		return false;
	common.end = common.at + length;
	if (take(&common, 4) != 0)
		return false;
	uint64_t version = take(&common, 1);
	if (version != 1 && version != 3)
		return false;
	augmentation = common.at;
	while (take(&common, 1) != 0 && !common.bad)
		;
	entry->code_factor = take_unsigned(&common);
	entry->data_factor = take_signed(&common);
	if ((version == 1 ? take(&common, 1) : take_unsigned(&common)) != RA || common.bad)
		return false;
	entry->is_signal = false;
	entry->has_data = *augmentation == 'z';
	if (entry->has_data) {
		struct bytes data = take_block(&common);

		for (augmentation++; *augmentation != '\0' && !data.bad; augmentation++) {
			switch (*augmentation) {
			case 'R':
				encoding = (uint8_t)take(&data, 1);
				break;
			case 'P': {
				uint8_t of_routine = (uint8_t)take(&data, 1);

				take_pointer(&data, of_routine & 0x7f, NULL);
				break;
			}
			case 'L':
				take(&data, 1);
				break;
			case 'S':
				entry->is_signal = true;
				break;
			case 'B':
				break;
			default:
				return false;
			}
		}
		if (data.bad)
			return false;
	} else if (*augmentation != '\0') {
		return false;
	}
	entry->begin = take_pointer(&own, encoding, NULL);
	entry->length = take_pointer(&own, encoding & 0x0f, NULL);
	if (entry->has_data)
		take_block(&own);
	entry->common = common;
	entry->own = own;
	return !own.bad && !common.bad;
}

/* The place of the last entry that begins at `pc` or before it: a binary search in the header's table. */
static const uint8_t *find_entry(const struct module *module, uintptr_t pc)
{
	struct bytes header = { .at = module->header, .end = module->high };
	uint8_t version = (uint8_t)take(&header, 1), of_table, of_count, of_entries;
	uint64_t count;
	const int32_t *table;

	of_table = (uint8_t)take(&header, 1);
	of_count = (uint8_t)take(&header, 1);
	of_entries = (uint8_t)take(&header, 1);
	take_pointer(&header, of_table, module->header);
	count = take_pointer(&header, of_count, module->header);
	/* 0x3b: pairs of 32-bit distances from the header. Every linker writes it so. */
	if (version != 1 || of_entries != 0x3b || header.bad || (uint64_t)(header.end - header.at) / 8 < count || count == 0)
		return NULL;
	table = (const int32_t *)header.at;
	uint64_t low = 0, high = count;
	while (high - low > 1) {
		uint64_t middle = low + (high - low) / 2;

		if ((uintptr_t)module->header + (uintptr_t)(intptr_t)table[2 * middle] <= pc)
			low = middle;
		else
			high = middle;
	}
	if ((uintptr_t)module->header + (uintptr_t)(intptr_t)table[2 * low] > pc)
		return NULL;
	const uint8_t *place = module->header + table[2 * low + 1];
	return place >= module->low && place < module->high ? place : NULL;
}

/* The meaning of an expression, of a few shapes (src/unwind/expression.rs has their origin). */
struct form {
	enum { FORM_OTHER, FORM_REGISTER, FORM_DEREF, FORM_PLT } kind;
	uint64_t number;
	int64_t offset, add;
};

static struct form form_of(struct bytes code)
{
	struct form form = { .kind = FORM_OTHER };
	uint8_t op;

	if (code.bad)
		return form;
	op = (uint8_t)take(&code, 1);
	if (op < 0x70 || op > 0x8f) /* breg0 to breg31 */
		return form;
	form.number = op - 0x70u;
	form.offset = take_signed(&code);
	if (code.at == code.end && !code.bad) {
		form.kind = FORM_REGISTER;
		return form;
	}
	op = (uint8_t)take(&code, 1);
	if (op == 0x06) { /* deref */
		if (code.at < code.end) {
			op = (uint8_t)take(&code, 1);
			if (op == 0x23) /* plus_uconst */
				form.add = (int64_t)take_unsigned(&code);
			else if (op >= 0x30 && op <= 0x4f && take(&code, 1) == 0x22) /* lit, plus */
				form.add = op - 0x30;
			else
				return form;
		}
		if (code.at == code.end && !code.bad)
			form.kind = FORM_DEREF;
		return form;
	}
#ifdef __x86_64__
	/* breg7 8; breg16 0; lit15; and; litN; ge; lit3; shl; plus */
	if (form.number == SP && form.offset == 8 && op == 0x80 && take_signed(&code) == 0 && take(&code, 1) == 0x3f && take(&code, 1) == 0x1a) {
		op = (uint8_t)take(&code, 1);
		if (op >= 0x30 && op <= 0x3f && take(&code, 1) == 0x2a && take(&code, 1) == 0x33 && take(&code, 1) == 0x24 &&
		    take(&code, 1) == 0x22 && code.at == code.end && !code.bad) {
			form.kind = FORM_PLT;
			form.offset = op - 0x30;
		}
	}
#endif
	return form;
}

/* The code of a register in a rule; 0 = it is never known here. */
static uint8_t code_of(uint64_t number)
{
	return is_register(number, BP) ? FP_REG_BP : is_register(number, SP) ? FP_REG_SP : 0;
}

static bool slot_of(int64_t offset, int8_t *slot)
{
	if (offset % 8 != 0 || offset / 8 < INT8_MIN || offset / 8 > INT8_MAX)
		return false;
	*slot = (int8_t)(offset / 8);
	return true;
}

static bool set_cfa(struct fp_rule *rule, const struct row *row)
{
	struct form form = { .kind = FORM_REGISTER, .number = row->cfa_register, .offset = row->cfa_offset };

	if (row->by_expression)
		form = form_of(row->cfa_expression);
	if (form.kind == FORM_PLT) {
		rule->cfa = FP_CFA_PLT;
		rule->offset = (int)form.offset;
		return true;
	}
	rule->registers = code_of(form.number);
	if (rule->registers == 0)
		return false;
	if (form.kind == FORM_REGISTER && form.offset == (int32_t)form.offset) {
		rule->cfa = FP_CFA_REGISTER;
		rule->offset = (int)form.offset;
		return true;
	}
	if (form.kind == FORM_DEREF && form.offset == (int16_t)form.offset && form.add == (int16_t)form.add) {
		rule->cfa = FP_CFA_DEREF;
		rule->deref_offset = (int16_t)form.offset;
		rule->deref_add = (int16_t)form.add;
		return true;
	}
	return false;
}

/* Where bp is. `base` is the register and offset that define the CFA, for places too far from it. */
static uint8_t set_bp(struct fp_rule *rule, const struct row *row)
{
	const struct place *bp = &row->bp;
	int8_t slot;

	switch (bp->kind) {
	case PLACE_UNSET:
	case PLACE_SAME:
		return FP_BP_SAME;
	case PLACE_AT_CFA:
		if (slot_of(bp->value, &slot)) {
			rule->bp_slot = slot;
			return FP_BP_AT_CFA;
		}
#ifdef __aarch64__
		if (rule->cfa == FP_CFA_REGISTER && slot_of(bp->value + rule->offset, &slot)) {
			rule->bp_slot = slot;
			return rule->registers == FP_REG_SP ? FP_BP_AT_SP : FP_BP_AT_BP;
		}
#endif
		return FP_BP_LOST;
	case PLACE_EXPRESSION: {
		struct form form = form_of(bp->expression);

		if (form.kind != FORM_REGISTER || code_of(form.number) == 0 || !slot_of(form.offset, &slot))
			return FP_BP_LOST;
		rule->bp_slot = slot;
		return code_of(form.number) == FP_REG_BP ? FP_BP_AT_BP : FP_BP_AT_SP;
	}
	default:
		return FP_BP_LOST;
	}
}

static const struct fp_rule UNSUPPORTED = { .cfa = FP_CFA_UNSUPPORTED };

static struct fp_rule rule_of(const struct row *row)
{
	struct fp_rule rule = { 0 };
	uint8_t bp, ra;

	if (row->ra.kind == PLACE_UNDEFINED)
		return (struct fp_rule){ .cfa = FP_CFA_END };
	if (!set_cfa(&rule, row))
		return UNSUPPORTED;
	bp = set_bp(&rule, row);
#ifdef __x86_64__
	if (row->ra.kind != PLACE_AT_CFA || row->ra.value != -8)
		return UNSUPPORTED;
	ra = FP_RA_AT_CFA;
#else
	if (row->ra.kind == PLACE_UNSET || row->ra.kind == PLACE_SAME)
		return UNSUPPORTED; /* in x30, which is known in the first frame only, and that is the library's own */
	if (row->ra.kind != PLACE_AT_CFA)
		return UNSUPPORTED;
	if (bp != FP_BP_LOST && row->bp.kind == PLACE_AT_CFA && row->bp.value + 8 == row->ra.value) {
		ra = FP_RA_BESIDE_BP;
	} else {
		int8_t slot;

		bp = bp == FP_BP_SAME ? bp : FP_BP_LOST;
		if (slot_of(row->ra.value, &slot))
			ra = FP_RA_AT_SLOT;
		else if (rule.cfa == FP_CFA_REGISTER && slot_of(row->ra.value + rule.offset, &slot))
			ra = FP_RA_AT_REG;
		else
			return UNSUPPORTED;
		rule.bp_slot = slot;
	}
#endif
	rule.saved = (unsigned char)(bp | ra << 4);
	return rule;
}

struct fp_rule cfi_rule(const struct module *module, uintptr_t pc)
{
	const uint8_t *place = find_entry(module, pc);
	struct row row = { 0 }, initial;
	struct entry entry;

	if (place == NULL)
		return (struct fp_rule){ .cfa = FP_CFA_NONE };
	if (!read_entry(module, place, &entry))
		return UNSUPPORTED;
	if (pc < entry.begin || pc - entry.begin >= entry.length)
		return (struct fp_rule){ .cfa = FP_CFA_NONE };
	if (entry.is_signal)
		return (struct fp_rule){ .cfa = FP_CFA_SIGNAL };
	/* The common entry's instructions are at no place of the function: they are all run. */
	initial = row;
	if (!run(entry.common, &entry, UINT64_MAX, &row, &initial))
		return UNSUPPORTED;
	initial = row;
	if (!run(entry.own, &entry, pc, &row, &initial))
		return UNSUPPORTED;
	return rule_of(&row);
}
